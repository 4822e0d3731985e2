"""Which set of buckets a pass takes, and in which order its gradients come, with one rank and counted hooks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.torch import GradientAverager
from ring_plugins.torch.bucket_sets import BucketSets, communicator_for
from ring_plugins.torch.hooks import Hooks

#: A bucket for each parameter of four numbers.
SIZES = BucketSizes(16, 16)


class Averager:
    """Hooks refer to it weakly."""


def sets_of(model, communicator=None):
    averager = Averager()
    found = BucketSets(
        *(model, communicator or SingleCommunicator("alone"), Hooks(averager, 0, None), None, SIZES, None),
        gathers_sparse=False,
    )
    found.averager = averager
    found.take_parameters()
    return found


def parameters(count):
    return [(f"p{i}", nn.Parameter(torch.ones(4))) for i in range(count)]


def come(sets, *order, passes=0):
    """A pass in which gradients come in this order."""
    buckets = sets.current(passes)
    sets._hooks.arrivals[:] = [id(sets.parameters[i]) for i in order]
    sets.learn_order(buckets)
    return buckets


def order_of(buckets):
    return [buckets.names[i] for bucket in buckets.plan.buckets for i in bucket.entries]


def test_buckets_fill_in_the_order_of_the_first_backward():
    sets = sets_of(parameters(3))
    first = come(sets, 1, 2, 0)
    assert order_of(first) == ["p2", "p1", "p0"]
    second = sets.current(1)
    assert (order_of(second), second.reducer.passes, second.is_ordered) == (["p1", "p2", "p0"], 1, True)
    assert sets._hooks.arrivals is None


def test_gradients_that_did_not_come_are_last_and_one_that_came_twice_counts_once():
    sets = sets_of(parameters(4))
    come(sets, 2, 2, 0, 2)
    assert order_of(sets.current(1)) == ["p2", "p0", "p3", "p1"]


def test_a_backward_without_gradients_teaches_nothing():
    sets = sets_of(parameters(2))
    buckets = come(sets)
    assert sets.current(1) is buckets
    assert sets._hooks.arrivals == []


def test_the_order_that_the_model_has_needs_no_other_buckets():
    sets = sets_of(parameters(2))
    buckets = come(sets, 1, 0)
    assert sets.current(1) is buckets
    assert buckets.is_ordered


def test_rank_0_decides_on_the_order():
    class SecondRank(SingleCommunicator):
        def broadcast_object(self, item, root=0, purpose=""):
            assert item is None
            return [1, 0]

    second = SecondRank("two")
    second.rank, second.ranks = 1, (0, 1)
    sets = sets_of(parameters(3), second)
    come(sets, 2, 1, 0)
    assert order_of(sets.current(1)) == ["p1", "p0", "p2"]


def test_sets_of_parameters_that_take_turns_keep_their_buckets_and_what_is_known_of_their_order():
    sets = sets_of(parameters(3))
    (_, first), _, (_, last) = sets.named
    last.requires_grad_(False)
    come(sets, 0, 1)
    pair = sets.current(1)
    last.requires_grad_(True)
    first.requires_grad_(False)
    come(sets, 2, 1, passes=1)
    first.requires_grad_(True)
    assert order_of(sets.current(2)) == ["p2", "p1", "p0"]
    last.requires_grad_(False)
    assert sets.current(2) is pair
    for frozen in (0b001, 0b010, 0b100, 0b011):  # four others, so the pair's are gone
        for position, (_, one) in enumerate(sets.named):
            one.requires_grad_(not frozen >> position & 1)
        sets.current(3)
    last.requires_grad_(False)
    first.requires_grad_(True)
    sets.parameters[1].requires_grad_(True)
    assert sets.current(4) is not pair


def test_what_has_gradients_of_its_own_takes_part_though_it_is_frozen():
    sets = sets_of(parameters(2))
    sets.hold_trained()
    sets.parameters[0].requires_grad_(False)
    buckets = sets.current(0)
    assert (buckets.names, buckets.noted) == (["p0", "p1"], "")
    sets.hold_trained()
    assert "has trained only p1 in a pass before it" in sets.current(0).noted
    sets.let_go()
    assert sets.current(0).names == ["p1"]


def test_parameters_that_a_module_gets_are_taken():
    model = nn.Linear(2, 2)
    sets = sets_of(model)
    assert sets.current(0).names == ["weight", "bias"]
    model.extra = nn.Parameter(torch.ones(1))
    assert sets.current(0).names == ["weight", "bias", "extra"]


def test_tensors_on_several_devices_are_rejected():
    named = [("first", nn.Parameter(torch.ones(1))), ("second", nn.Parameter(torch.ones(1, device="meta")))]
    with pytest.raises(ValueError, match="second is on meta"):
        communicator_for(named)
    fake = SimpleNamespace(device=torch.device("cuda", 1))
    with pytest.raises(ValueError, match="first on cpu, second on cuda:1"):
        communicator_for([named[0], ("second", fake)])


def test_sizes_that_a_tuner_chooses_hold_from_the_next_pass():
    averager = GradientAverager(parameters(2), communicator=SingleCommunicator("alone"), overlap=False)
    assert len(averager._sets.current(0).plan.buckets) == 1
    averager._sets.resize(SIZES)
    assert len(averager._sets.current(0).plan.buckets) == 2
    assert averager.reduced_bytes == 0
    averager.close()
