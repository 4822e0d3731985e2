"""torch's arguments as flat memory and counts, in one process."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.torch.tensors import (
    EqualParts,
    Target,
    Targets,
    all_at,
    by_type,
    elements_by_rank,
    flat_sources,
    one_per_rank,
    operation,
    single,
)

GROUP = SimpleNamespace(rank=lambda: 1, size=lambda: 3)


def test_a_contiguous_target_is_written_in_place():
    tensor = torch.zeros(2, 3)
    target = Target(tensor, "tensor")
    assert target.flat.data_ptr() == tensor.data_ptr()
    target.flat.fill_(7)
    target.store()
    assert tensor.eq(7).all()


@pytest.mark.parametrize("keep", [True, False])
def test_a_strided_target_is_staged_and_stored(keep):
    tensor = torch.arange(6.0).view(2, 3).t()
    target = Target(tensor, "tensor", keep=keep)
    assert target.flat.data_ptr() != tensor.data_ptr()
    if keep:
        assert target.flat.tolist() == [0, 3, 1, 4, 2, 5]
    target.flat.copy_(torch.arange(6.0) + 10)
    target.store()
    assert tensor.tolist() == [[10, 11], [12, 13], [14, 15]]


def test_neighbors_in_memory_are_joined_without_a_copy():
    whole = torch.arange(6.0).view(3, 2)
    assert Targets(list(whole), "outputs").flat.data_ptr() == whole.data_ptr()
    assert flat_sources(list(whole), "inputs").data_ptr() == whole.data_ptr()


def test_scattered_tensors_are_staged_and_stored_in_order():
    tensors = [torch.zeros(2), torch.zeros(3)]
    targets = Targets(tensors, "outputs")
    targets.flat.copy_(torch.arange(5.0))
    targets.store()
    assert [tensor.tolist() for tensor in tensors] == [[0, 1], [2, 3, 4]]


def test_parts_must_be_equal():
    assert EqualParts(torch.zeros(6), 3, "output").counts == [2, 2, 2]
    with pytest.raises(ArgumentError, match="output has 5 elements, which do not divide among 3 ranks"):
        EqualParts(torch.zeros(5), 3, "output")


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
