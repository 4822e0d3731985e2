"""Buckets, the layout of gradients, what scripts keep of them, and what a repeated pass needs no copy of."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.gpu import nccl
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.observe.consistency import COUNT
from ring_plugins.torch import GradientAverager, gradient_buckets
from ring_plugins.torch.gradient_buckets import GradientBuckets
from tests.core.collectives.mortal_ranks import on_mortal_ranks
from tests.core.collectives.thread_ranks import on_thread_ranks

#: Has exact averages over 1, 2 and 3 ranks.
UNIT = 6.0
COUNTS = (10, 300, 300_000)


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


# What a script keeps, or made itself ---------------------------------------------------------------


class Trained:
    """A layer and its buckets, for a communicator that doubles what it reduces."""

    def __init__(self):
        class Doubling(SingleCommunicator):
            def all_reduce(self, memory, op, codec=None):
                super().all_reduce(memory, op)
                memory.array[:] *= 2

        self.layer = nn.Linear(3, 2)
        sizes = BucketSizes(1 << 20, 1 << 20)
        self.buckets = buckets_for(self.layer.weight, self.layer.bias, sizes=sizes, communicator=Doubling("test"))

    def train(self, factor):
        (self.layer(torch.ones(1, 3)) * factor).sum().backward()
        self.buckets.reducer.finish(self.buckets.fill)
        self.buckets._give_back()


@pytest.mark.parametrize(
    "keep",
    [
        lambda gradient: gradient,
        lambda gradient: gradient.view(-1),
        lambda gradient: gradient[1:],
        lambda gradient: gradient.numpy(),
        torch.from_dlpack,
    ],
    ids=["gradient", "view", "part", "numpy", "DLPack"],
)
def test_what_is_kept_keeps_its_values_and_the_next_average_has_memory_of_its_own(keep):
    trained = Trained()
    trained.train(1.0)
    kept = keep(trained.layer.weight.grad)
    assert (kept == 2).all()
    for factor in (5.0, 7.0):
        trained.layer.zero_grad()
        trained.train(factor)
        assert (kept == 2).all()
        assert (trained.layer.weight.grad == 2 * factor).all()


def test_what_nobody_keeps_lives_in_the_bucket():
    trained = Trained()
    places = []
    for _ in range(3):
        trained.layer.zero_grad()
        trained.train(1.0)
        places.append(trained.layer.weight.grad.data_ptr())
    assert len(set(places)) == 1


def test_a_gradient_that_a_script_made_stays_and_gets_the_average():
    trained = Trained()
    buffer = torch.zeros(8)
    made = buffer[:6].view(2, 3)
    trained.layer.weight.grad, trained.layer.bias.grad = made, buffer[6:]
    trained.train(3.0)
    assert trained.layer.weight.grad is made
    assert (buffer == 6).all()


# What autograd still has, where ranks may be lost ---------------------------------------------------


def train(rank, model, steps, zero, number, how, overlap):
    """Averages of all steps, and the bytes that were copied for a repetition."""
    communicator = rank.communicator("gradients")
    averager = GradientAverager(model, communicator=communicator, bucket_bytes=4096, overlap=overlap)
    first, found, addresses = rank.barriers, [], []
    model[-1].register_post_accumulate_grad_hook(lambda p: addresses.append(p.grad.data_ptr()))
    if rank.rank == 1:
        rank.dies = lambda at: how if at - first == number else None
    for step in range(steps):
        zero(model)
        before = [p.grad for p in model]
        sum((p * torch.full_like(p, UNIT * 3**rank.rank * (step + 1))).sum() for p in model).backward()
        if before[-1] is not None:
            assert all(now.grad is then for now, then in zip(model, before, strict=True))
        found.append([sorted(set(p.grad.tolist())) for p in model])
        addresses.append(model[-1].grad.data_ptr())
    copies = averager._buckets.reducer.kept._copies
    return found, sum(copy.nbytes for copy in copies.values()), addresses


def no_job(monkeypatch):
    """The ranks are threads: nobody joins or leaves."""
    world = SimpleNamespace(is_joining=False, replaces=False, elastic=SimpleNamespace(view=0, wants_change=False))
    for module in ("consistency", "gradients"):
        monkeypatch.setattr(f"ring_plugins.torch.{module}.current", lambda: world)
    monkeypatch.setattr("ring_plugins.torch.bucket_sets.has_room_to_overlap", lambda threads: False)


@pytest.mark.parametrize(
    ("in_place", "how", "overlap"),
    [
        (False, "in", False),
        (True, "before", True),
        (False, "before", True),
        pytest.param(True, "in", False, marks=pytest.mark.slow),
        pytest.param(True, "in", True, marks=pytest.mark.slow),
    ],
)
def test_a_pass_is_repeated_from_what_autograd_has_wherever_a_rank_dies(monkeypatch, in_place, how, overlap):
    no_job(monkeypatch)
    number, died = 0, True
    while died:
        number += 1

        def run(rank, number=number):
            torch.set_num_threads(1)
            model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(count)) for count in COUNTS])
            return train(rank, model, 3, lambda model: model.zero_grad(set_to_none=not in_place), number, how, overlap)

        results = on_mortal_ranks(monkeypatch, 3, run)
        died = results[1] is None
        (found, copied, addresses), (other, *_) = results[0], results[2]
        assert found == other
        for step, averages in enumerate(found):
            over = [[UNIT * (step + 1) * sum(3**rank for rank in ranks) / len(ranks)] for ranks in ((0, 1, 2), (0, 2))]
            assert averages[0] in over and averages == averages[:1] * len(COUNTS)
        if in_place:
            assert copied > 4 * sum(COUNTS) and len(set(addresses[1:])) == 1
        else:
            assert copied < 4 * COUNTS[1]  # flags and control numbers
            if not overlap:  # where the hook comes before the bucket's
                assert addresses[0] == addresses[3] and addresses[2] == addresses[5]  # a gradient, and the next average
    assert number >= 7  # the last run is one in which it lives


def test_memory_that_somebody_refers_to_takes_no_average(monkeypatch):
    no_job(monkeypatch)

    def run(rank):
        parameter, kept = torch.nn.Parameter(torch.zeros(COUNTS[-1])), []
        averager = GradientAverager([("p", parameter)], communicator=rank.communicator("gradients"))
        parameter.register_post_accumulate_grad_hook(lambda p: kept.extend([p.grad, p.grad.view(-1)[3:]][rank.rank :]))
        for _ in range(4):
            parameter.grad = None
            (parameter * torch.full_like(parameter, rank.rank + 1)).sum().backward()
            assert set(parameter.grad.tolist()) == {1.5}
            kept.append(parameter.grad)
        averager.close()
        return {value for tensor in kept for value in tensor.tolist()}

    assert on_mortal_ranks(monkeypatch, 2, run) == [{1.0, 1.5}, {2.0, 1.5}]


def test_what_one_of_several_ranks_tells_is_seen_by_a_process_that_made_its_buckets_before_it_joined_them():
    communicator = SingleCommunicator("test")
    buckets = buckets_for(nn.Parameter(torch.ones(4)), communicator=communicator)
    communicator.size = 6
    assert buckets._shares(torch.tensor([0.0, 1 / 6])) == (0.0, pytest.approx(1 / 6))


def test_control_numbers_that_are_being_copied_from_a_gpu_are_read_again_before_they_are_believed(monkeypatch):
    buckets = buckets_for(nn.Parameter(torch.ones(2)))
    told = torch.zeros_like(buckets._control)
    told[gradient_buckets._OPTIONS] = 1.0  # a bit of one step, whose inverse is still that of the step before
    told[gradient_buckets._OPTIONS + COUNT // 2] = 1.0
    buckets._late_control = told
    with pytest.raises(MismatchError):
        buckets.check_late()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", told.zero_)
    monkeypatch.setattr(gradient_buckets, "is_capturing", lambda: False)
    assert not buckets.check_late()
