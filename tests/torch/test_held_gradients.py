"""What a script keeps of a bucket stays as it was, and what it made for `p.grad` gets the average."""

import pytest
import torch
from torch import nn

from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.torch.gradient_buckets import GradientBuckets


class Trained:
    """A layer and its buckets, for a communicator that doubles what it reduces."""

    def __init__(self):
        class Doubling(SingleCommunicator):
            def all_reduce(self, memory, op, codec=None):
                super().all_reduce(memory, op)
                memory.array[:] *= 2

        self.layer = nn.Linear(3, 2)
        self.buckets = GradientBuckets(
            list(self.layer.named_parameters()), Doubling("test"), BucketSizes(1 << 20, 1 << 20), None, set(), True
        )

    def train(self, factor):
        (self.layer(torch.ones(1, 3)) * factor).sum().backward()
        self.buckets.reducer.finish(self.buckets.fill)
        self.buckets._held.give_back({})


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
