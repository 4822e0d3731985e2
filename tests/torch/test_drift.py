"""Checksums of parameters."""

import pytest
import torch
from torch import nn

from ring_plugins.torch.drift import _on_device, parameter_checksums
from tests.launch import run_ranks

# Forward raises on rank 0 in its third batch, and its script goes on. It has one batch more than rank 1.
MISSED_BATCH = """
import torch
import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer
from tests.worker import report

ring.init(ranks=2)
rank = ring.rank()

def train(counts_inside):
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), drift_check_every=1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(6 - rank):
        try:
            optimizer.zero_grad()
            if (rank, number) == (0, 2):
                raise ValueError("a batch that cannot be read")
            model(torch.full((2, 3), rank + number + 1.0)).sum().backward()
            optimizer.step()
            if counts_inside:
                scheduler.step()
        except ValueError:
            pass
        if not counts_inside:
            scheduler.step()
    return [value.tolist() for value in model.parameters()]

report("inside", train(True))
try:
    train(False)
except ring.MismatchError as error:
    report("outside", str(error))
"""


@pytest.mark.slow
def test_a_batch_missed_before_the_first_gradient_leaves_weights_equal_or_the_learning_rates_are_compared():
    result = run_ranks(MISSED_BATCH, 2)
    first, second = result.values("inside")
    assert first == second
    assert len(result.values("outside")) == 2
    for text in result.values("outside"):
        assert "the options of parameter group 0 differ among ranks (rank 0: lr=0.0125" in text
        assert "rank 1: lr=0.025" in text


def test_one_flipped_bit_changes_one_checksum():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    names, before = parameter_checksums(model.named_parameters())
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    model[1].bias.data.view(torch.int32)[0] ^= 1
    _, after = parameter_checksums(model.named_parameters())
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, True, False]


def test_layout_does_not_matter_and_odd_sizes_are_summed_up():
    weight = torch.randn(2, 3, 2, 2)
    both = [("a", nn.Parameter(weight)), ("b", nn.Parameter(weight.to(memory_format=torch.channels_last)))]
    _, (first, second) = parameter_checksums(both)
    assert first == second
    assert int(_on_device(torch.arange(5, dtype=torch.uint8))) == 10
