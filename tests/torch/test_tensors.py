"""torch's arguments as flat memory and counts, in one process."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.torch import GradientAverager
from ring_plugins.torch.consistency import parameter_checksums
from ring_plugins.torch.tensor_memory import check_plain, gradient_dtype, host_memory_of
from ring_plugins.torch.tensors import (
    Target,
    all_at,
    all_gather,
    all_to_all,
    by_type,
    elements_by_rank,
    equal_parts,
    flat_source,
    flat_sources,
    one_per_rank,
    operation,
    reduce_scatter,
    single,
)
from tests.core.arrays.test_memory import Distributed, Wrapper
from tests.core.collectives.thread_ranks import on_thread_ranks

GROUP = SimpleNamespace(rank=lambda: 1, size=lambda: 3)
SINGLE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
PAIR = SimpleNamespace(rank=lambda: 1, size=lambda: 2)


def test_a_contiguous_target_is_written_in_place():
    tensor = torch.zeros(2, 3)
    target = Target([tensor], "tensor")
    assert target.flat.data_ptr() == tensor.data_ptr()
    target.flat.fill_(7)
    target.store()
    assert tensor.eq(7).all()


@pytest.mark.parametrize("keep", [True, False])
def test_a_strided_target_is_staged_and_stored(keep):
    tensor = torch.arange(6.0).view(2, 3).t()
    target = Target([tensor], "tensor", keep=keep)
    assert target.flat.data_ptr() != tensor.data_ptr()
    if keep:
        assert target.flat.tolist() == [0, 3, 1, 4, 2, 5]
    target.flat.copy_(torch.arange(6.0) + 10)
    target.store()
    assert tensor.tolist() == [[10, 11], [12, 13], [14, 15]]


def test_neighbors_in_memory_are_joined_without_a_copy():
    whole = torch.arange(6.0).view(3, 2)
    assert Target(list(whole), "outputs").flat.data_ptr() == whole.data_ptr()
    assert flat_sources(list(whole), "inputs").data_ptr() == whole.data_ptr()


def test_scattered_tensors_are_staged_and_stored_in_order():
    tensors = [torch.zeros(2), torch.zeros(3)]
    targets = Target(tensors, "outputs")
    targets.flat.copy_(torch.arange(5.0))
    targets.store()
    assert [tensor.tolist() for tensor in tensors] == [[0, 1], [2, 3, 4]]


def test_parts_must_be_equal():
    assert equal_parts(torch.zeros(6), "output", GROUP) == [2, 2, 2]
    with pytest.raises(ArgumentError, match="output has 5 elements, which do not divide among 3 ranks"):
        equal_parts(torch.zeros(5), "output", GROUP)


def test_rows_become_elements():
    rows = torch.zeros(6, 4)
    assert elements_by_rank(rows, [], "input", GROUP) == [8, 8, 8]
    assert elements_by_rank(rows, [1, 0, 5], "input", GROUP) == [4, 0, 20]
    assert all_at(2, 5, GROUP) == [0, 0, 5]
    with pytest.raises(ArgumentError, match="3 numbers that add up to 6 rows"):
        elements_by_rank(rows, [1, 1, 1], "input", GROUP)
    with pytest.raises(ArgumentError, match="7 rows, which do not divide among 3 ranks; give input_split_sizes"):
        elements_by_rank(torch.zeros(7), [], "input", GROUP)


def test_lists_have_the_length_that_torch_promises():
    assert single([5], "tensors") == 5
    with pytest.raises(ArgumentError, match="tensors has 2 elements"):
        single([1, 2], "tensors")
    with pytest.raises(ArgumentError, match="outputs on rank 1 has 2 tensors; it must have one for each of 3 ranks"):
        one_per_rank([torch.zeros(1)] * 2, "outputs", GROUP)


def test_reductions_and_types():
    assert operation(dist.ReduceOp.AVG, torch.zeros(1)) is Op.AVERAGE
    with pytest.raises(ArgumentError, match=r"op=.*BXOR.* is not offered"):
        operation(dist.ReduceOp.BXOR, torch.zeros(1, dtype=torch.int32))
    mixed = [torch.zeros(1), torch.zeros(2, dtype=torch.int64), torch.zeros(3)]
    assert [[len(t) for t in group] for group in by_type(mixed)] == [[1, 3], [2]]
    with pytest.raises(ArgumentError, match="all must have one type"):
        flat_sources(mixed, "inputs")


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (Wrapper(torch.ones(4)), "x is a Wrapper, a class that wraps other tensors: pass the plain tensor"),
        (Distributed(torch.ones(4)), r"x is a Distributed, .*pass x.to_local\(\) .* or x.full_tensor\(\)"),
        (torch.nested.nested_tensor([torch.ones(1)]), r"x is nested: pass torch.nested.to_padded_tensor\(x, 0\)"),
        (torch.ones(4).to_sparse(), r"x has layout torch.sparse_coo: pass x.to_dense\(\)"),
        (torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8), r"x is quantized: pass x.dequantize\(\)"),
        (torch._efficientzerotensor(4), r"x holds zeros that have no memory: pass x.clone\(\)"),
        (nn.LazyLinear(1).weight, "x is not initialized yet: run a forward"),
        (torch.ones(4, dtype=torch.complex64).conj(), r"x is conjugated or negated lazily: use x.resolve_conj\(\)"),
    ],
)
def test_tensors_that_are_not_plain_are_rejected_by_name(x, said):
    with pytest.raises(ArgumentError, match=said):
        check_plain(x, "x", is_written=True)


def test_only_parameters_that_are_trained_must_be_plain():
    """As with quantized weights that are frozen."""
    base, adapter = nn.Parameter(Wrapper(torch.ones(4)), requires_grad=False), nn.Parameter(torch.ones(2))
    named = [("base", base), ("adapter", adapter)]
    averager = GradientAverager(named, communicator=SingleCommunicator("one"))
    adapter.sum().backward()
    base.requires_grad_(True)
    with pytest.raises(ArgumentError, match="parameter base is a Wrapper, a class that wraps other tensors"):
        averager.prepare()
    assert parameter_checksums(named)[0] == ["adapter"]


def test_8_bit_floats_are_sent_and_not_summed_up_as_bytes():
    x = torch.ones(4).to(torch.float8_e4m3fn)
    assert flat_source(x, "x") is not None
    with pytest.raises(ArgumentError, match="tensors of torch.float8_e4m3fn can be sent, but not reduced"):
        operation(dist.ReduceOp.SUM, x)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch is older than 2.10")
def test_gradients_have_the_type_that_grad_dtype_says():
    """Small ones in buckets, a large one where it is, and one that a rank lacks."""

    def rank_of(rank, communicator):
        sizes = {"small": 3, "large": 600_000, "absent": 3}
        named = [(name, nn.Parameter(torch.zeros(size, dtype=torch.bfloat16))) for name, size in sizes.items()]
        for _, parameter in named:
            parameter.grad_dtype = torch.float32
        averager = GradientAverager(named, communicator=communicator, autotune=False)
        for _ in range(3):
            for _, parameter in named:
                parameter.grad = None
            sum((p.float() * (1 + rank / 128)).sum() for name, p in named if name != "absent" or rank == 1).backward()
        averager._hooks.remove()
        return [(p.grad.dtype, p.grad[0].item()) for _, p in named]

    for found in on_thread_ranks(2, rank_of):
        assert [dtype for dtype, _ in found] == [torch.float32] * 3
        assert [value for _, value in found] == [1 + 1 / 256, 1 + 1 / 256, 0.5 + 1 / 256]  # no bfloat16


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch is older than 2.10")
def test_gradients_of_any_type_are_rejected():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad_dtype = None
    with pytest.raises(ArgumentError, match="grad_dtype of p is None"):
        gradient_dtype(parameter, "p")


def test_gradients_and_compared_parameters_can_be_resized_afterwards():
    gradient, parameter = torch.ones(2, 3), nn.Parameter(torch.ones(2, 3))
    memory = host_memory_of(gradient, "float32")
    memory.array[0] = 5.0
    assert gradient[0, 0] == 5.0 and memory.array.shape == (6,)
    parameter_checksums([("weight", parameter)])
    assert gradient.untyped_storage().resizable() and parameter.untyped_storage().resizable()


def run(exchange):
    exchange(SingleCommunicator("test"))


def test_results_reach_tensors_of_any_layout():
    source = torch.arange(4.0)
    gathered, scattered, swapped = (torch.zeros(2, 2).t() for _ in range(3))
    run(all_gather([(source, Target([gathered], "output"), [4])], SINGLE))
    run(reduce_scatter([(scattered, source, [4])], dist.ReduceOp.SUM, SINGLE))
    run(all_to_all("all_to_all", [swapped], [source], SINGLE))
    assert gathered.tolist() == scattered.tolist() == swapped.tolist() == [[0, 1], [2, 3]]


def test_nothing_is_exchanged_in_a_direction_without_tensors():
    run(all_to_all("gather", [], [torch.zeros(0)], SINGLE, send_counts=[0]))


def test_all_gather_needs_a_place_for_the_ranks_own_tensor():
    target = Target([torch.zeros(1), torch.zeros(2)], "outputs")
    with pytest.raises(ArgumentError, match="all_gather on rank 1: the input has 3 elements of torch.float32"):
        all_gather([(torch.zeros(3), target, target.counts)], PAIR)


def test_reduce_scatter_needs_counts_that_fit():
    with pytest.raises(ArgumentError, match="reduce_scatter on rank 1: the input has 5 elements"):
        reduce_scatter([(torch.zeros(2), torch.zeros(5), [2, 2])], dist.ReduceOp.SUM, PAIR)


def test_all_to_all_needs_one_type():
    with pytest.raises(ArgumentError, match=r"scatter on rank 1: input is torch.int64, output is torch.float32"):
        all_to_all("scatter", [torch.zeros(2)], [torch.zeros(2, dtype=torch.int64)], PAIR)
