"""Buckets and the layout of gradients, with one rank."""

import threading

import pytest
import torch
from torch import nn

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.gpu import nccl
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.torch import gradient_buckets
from ring_plugins.torch.gradient_buckets import GradientBuckets
from tests.core.collectives.thread_ranks import on_thread_ranks


def buckets_for(*parameters, sizes=None, gathers_sparse=True, communicator=None):
    named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
    communicator = communicator or SingleCommunicator("test")
    return GradientBuckets(named, communicator, sizes or BucketSizes(), None, set(), gathers_sparse)


def channels_last(*shape):
    return nn.Parameter(torch.randn(*shape).to(memory_format=torch.channels_last))


def reduce_all(buckets):
    for entry in range(len(buckets.parameters)):
        buckets.reducer.mark_ready(entry, buckets.fill)
    return buckets.finish()


def test_frozen_parameters_have_no_entry():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    weights[1].requires_grad_(False)
    buckets = buckets_for(*weights)
    assert buckets.entries == [0, -1, 1]
    assert buckets.names == ["p0", "p2"]


def test_small_gradients_move_into_the_bucket_in_their_parameters_layout():
    weight = channels_last(2, 3, 2, 2)
    buckets = buckets_for(weight)
    value = torch.randn(2, 3, 2, 2)
    weight.grad = value.clone()
    reduce_all(buckets)
    assert weight.grad is buckets.views[0]
    assert weight.grad.stride() == weight.stride()
    assert torch.equal(weight.grad, value)


def test_large_gradients_stay_unless_their_layout_differs_or_others_share_their_memory():
    plain, strided, shared = nn.Parameter(torch.ones(64)), channels_last(2, 8, 2, 2), nn.Parameter(torch.ones(64))
    buckets = buckets_for(plain, strided, shared, sizes=BucketSizes(1, 1, 8))
    assert buckets.views == [None, None, None]
    plain.grad, strided.grad, other = torch.ones(64), torch.ones(2, 8, 2, 2), torch.ones(8, 8)
    shared.grad = other.view(-1)
    where = plain.grad.data_ptr()
    reduce_all(buckets)
    assert plain.grad.data_ptr() == where
    assert strided.grad.stride() == strided.stride()
    assert shared.grad.data_ptr() != other.data_ptr()


def test_a_gradient_that_no_rank_has_stays_none():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    buckets = buckets_for(used, unused)
    used.grad = torch.ones(2)
    reduce_all(buckets)
    assert used.grad.tolist() == [1, 1]
    assert unused.grad is None


def test_averages_reach_gradients_whose_data_a_script_has_replaced():
    """`p.grad.data = ...` takes the tensor that was a view of the bucket to other memory."""

    def rank_of(rank, communicator):
        weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        buckets = buckets_for(*weights, communicator=communicator)
        found = []
        for step in range(3):
            for weight in weights:
                weight.grad = torch.full((2,), step + rank + 1.0)
            reduce_all(buckets)
            found.append([weight.grad.tolist() for weight in weights])
            weights[0].grad.data = torch.full((2,), 10.0 * (rank + 1))  # of which the next pass takes the average
            reduce_all(buckets)
            found.append([weight.grad.tolist() for weight in weights])
        return found

    found = on_thread_ranks(2, rank_of)
    steps = ([[[1.5 + step] * 2] * 2, [[15.0] * 2, [1.5 + step] * 2]] for step in range(3))
    assert found == [[one for both in steps for one in both]] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("direct_bytes", [1, 1 << 20])
def test_a_model_that_was_converted_since_is_rejected(set_to_none, direct_bytes):
    """Averages would not reach it: its gradients were views of buckets for another dtype."""
    model = nn.Linear(3, 2)
    buckets = buckets_for(*model.parameters(), sizes=BucketSizes(direct_bytes=direct_bytes))
    model(torch.ones(1, 3)).sum().backward()
    reduce_all(buckets)
    if set_to_none:
        model.zero_grad()
    model.double()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    with pytest.raises(ArgumentError, match="was torch.float32 of shape .* and is torch.float64 of shape .* now"):
        reduce_all(buckets)


@pytest.mark.parametrize("gathers", [True, False])
def test_sparse_gradients_are_found_in_the_first_pass_or_made_dense(gathers):
    table = nn.Embedding(5, 2, sparse=True)
    buckets = buckets_for(table.weight, gathers_sparse=gathers)
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert reduce_all(buckets).found_sparse == ([table.weight] if gathers else [])
    assert table.weight.grad.is_sparse == gathers
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0, 2, 0, 1, 0]


def test_an_abandoned_pass_leaves_the_next_one_clean():
    weight = nn.Parameter(torch.ones(2))
    buckets = buckets_for(weight, nn.Parameter(torch.ones(2)))
    weight.grad = torch.ones(2)
    buckets.reducer.mark_ready(0, buckets.fill)
    assert buckets.fail().failed == 1
    assert not buckets.reducer.is_under_way
    weight.grad = torch.full((2,), 3.0)
    reduce_all(buckets)
    assert weight.grad.tolist() == [3, 3]


def test_a_parameter_on_another_device_is_rejected():
    with pytest.raises(ArgumentError, match="p is on cpu, but gradients are averaged on GPU 1"):
        gradient_buckets._entry("p", nn.Parameter(torch.ones(2)), 1, None)


@pytest.mark.parametrize("direct_bytes", [1, None])
def test_gradients_on_gpus_are_scaled_in_float32_and_summed(gpu, direct_bytes):
    gpu.communicator.size = 3  # as if the other ranks had zeros
    weights = [nn.Parameter(torch.zeros(2048, dtype=torch.bfloat16)) for _ in range(2)]
    sizes = BucketSizes(direct_bytes=direct_bytes)
    buckets = buckets_for(*weights, sizes=sizes, gathers_sparse=False, communicator=gpu.communicator)
    gradients = [torch.rand(2048, dtype=torch.bfloat16) + 1 for _ in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    reduce_all(buckets)
    assert set(gpu.nccl.reductions) == {nccl.REDUCTIONS[Op.SUM]}
    for weight, gradient in zip(weights, gradients, strict=True):
        assert torch.equal(weight.grad, (gradient.float() * (1 / 3)).bfloat16())
    assert float(buckets._flags[0][0]) == 1


def test_large_gradients_on_gpus_keep_their_memory_while_the_host_is_ahead(gpu):
    weight, done = nn.Parameter(torch.zeros(8)), threading.Event()
    buckets = buckets_for(weight, sizes=BucketSizes(direct_bytes=1), communicator=gpu.communicator)
    gpu.nccl.cuda.waits_at_once = False  # of the script, as long as it asks for no result
    gpu.nccl.cuda.streams[gpu.communicator.stream].work.put(done.wait)
    weight.grad = torch.ones(8)
    pointers = set()
    for _ in range(4):
        reduce_all(buckets)
        pointers.add(weight.grad.data_ptr())
        weight.grad.zero_()
    done.set()
    assert len(pointers) == 1


def test_large_gradients_on_gpus_are_freed_with_their_parameters_reference(gpu):
    weight, done = nn.Parameter(torch.zeros(8)), threading.Event()
    buckets = buckets_for(weight, sizes=BucketSizes(direct_bytes=1), communicator=gpu.communicator)
    gpu.nccl.cuda.waits_at_once = False
    gpu.nccl.cuda.streams[gpu.communicator.stream].work.put(done.wait)
    weight.grad = torch.ones(8)
    reduce_all(buckets)
    uses = torch._C._storage_Use_Count(weight.grad.untyped_storage()._cdata)
    done.set()
    assert uses == 2  # this call's and the gradient's


def test_the_host_asks_once_which_absent_gradients_other_ranks_have(monkeypatch):
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    buckets = buckets_for(*weights, sizes=BucketSizes(1, 1), gathers_sparse=False)
    weights[1].grad = torch.ones(2)
    asked, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: asked.append(tensor.shape) or tolist(tensor))
    reduce_all(buckets)
    assert len(buckets.plan.buckets) == 3
    assert len(asked) == 1  # the control numbers tell nothing
    assert [weight.grad is None for weight in weights] == [True, False, True]


@pytest.mark.parametrize("ranks_with_gradient", [(0,), (1,), ()])
@pytest.mark.parametrize("sizes", [BucketSizes(), BucketSizes(1, 1, 1)])  # in a bucket; where autograd put it
def test_a_complex_parameter_without_gradient_on_some_ranks(ranks_with_gradient, sizes):
    def rank_of(rank, communicator):
        used, sometimes = (nn.Parameter(torch.ones(3, dtype=torch.complex64)) for _ in range(2))
        buckets = buckets_for(used, sometimes, sizes=sizes, communicator=communicator)
        used.grad = torch.full((3,), complex(rank, 1))
        sometimes.grad = torch.full((3,), complex(2, -4)) if rank in ranks_with_gradient else None
        reduce_all(buckets)
        return [None if p.grad is None else p.grad.tolist() for p in (used, sometimes)]

    expected = [complex(1, -2)] * 3 if ranks_with_gradient else None
    assert on_thread_ranks(2, rank_of) == [[[complex(0.5, 1)] * 3, expected]] * 2
