"""Exchanges check their tensors at once, and then need only a communicator."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.torch import exchanges
from ring_plugins.torch.tensors import Target

SINGLE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
PAIR = SimpleNamespace(rank=lambda: 1, size=lambda: 2)


def run(exchange):
    exchange(SingleCommunicator("test"))


def test_results_reach_tensors_of_any_layout():
    source = torch.arange(4.0)
    gathered, scattered, swapped = (torch.zeros(2, 2).t() for _ in range(3))
    run(exchanges.all_gather([(source, Target([gathered], "output"), [4])], SINGLE))
    run(exchanges.reduce_scatter([(scattered, source, [4])], dist.ReduceOp.SUM, SINGLE))
    run(exchanges.all_to_all("all_to_all", [swapped], [source], SINGLE))
    assert gathered.tolist() == scattered.tolist() == swapped.tolist() == [[0, 1], [2, 3]]


def test_nothing_is_exchanged_in_a_direction_without_tensors():
    run(exchanges.all_to_all("gather", [], [torch.zeros(0)], SINGLE, send_counts=[0]))


def test_all_gather_needs_a_place_for_the_ranks_own_tensor():
    target = Target([torch.zeros(1), torch.zeros(2)], "outputs")
    with pytest.raises(ArgumentError, match="all_gather on rank 1: the input has 3 elements of torch.float32"):
        exchanges.all_gather([(torch.zeros(3), target, target.counts)], PAIR)


def test_reduce_scatter_needs_counts_that_fit():
    with pytest.raises(ArgumentError, match="reduce_scatter on rank 1: the input has 5 elements"):
        exchanges.reduce_scatter([(torch.zeros(2), torch.zeros(5), [2, 2])], dist.ReduceOp.SUM, PAIR)


def test_all_to_all_needs_one_type():
    with pytest.raises(ArgumentError, match=r"scatter on rank 1: input is torch.int64, output is torch.float32"):
        exchanges.all_to_all("scatter", [torch.zeros(2)], [torch.zeros(2, dtype=torch.int64)], PAIR)
