"""Which rank computes which samples of a global batch."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from ring_plugins.torch.step_plan import _Sampler, job_order, passes_of
from tests.torch.checks_global_batch import dataset


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("end", [16, 13, 3])
@pytest.mark.parametrize("is_even", [False, True])
def test_each_sample_of_a_step_counts_on_one_rank_whatever_their_number(size, end, is_even):
    by_rank = [passes_of(rank, size, 32, 32 + end, 4, is_even) for rank in range(size)]
    counting = [[one.number for one in passes if one.counts] for passes in by_rank]
    assert sorted(itertools.chain(*counting)) == list(range(32, 32 + end, 4))
    lengths = [len(passes) for passes in (by_rank if is_even else counting)]
    assert max(lengths) - min(lengths) <= (not is_even)
    assert all(len(passes) - len(numbers) <= 1 for passes, numbers in zip(by_rank, counting, strict=True))
    assert all(one.counts and one.number + 4 <= 32 + end for passes in by_rank for one in passes[1:])
    order = list(range(100, 100 + 32 + end))
    divided = []
    for rank in range(size):
        sampler = _Sampler(4, 16, is_even)
        sampler.divide(order, rank, size, 16)
        assert len(sampler) == len(list(sampler))
        divided += itertools.chain(*sampler)
    assert set(divided) == set(order[16:]) and (is_even or sorted(divided) == order[16:])


def test_the_order_is_the_samplers_and_that_of_every_process():
    data, weights = dataset(), torch.rand(70)
    orders = []
    for seed in (1, 2):  # of two processes
        torch.manual_seed(seed)
        loaders = [
            DataLoader(data, 4, shuffle=True),
            DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(seed)),
            DataLoader(data, 4, sampler=WeightedRandomSampler(weights, 50)),
            DataLoader(data, 4, sampler=range(9, 0, -1)),
        ]
        before = torch.get_rng_state()
        orders.append([[job_order(loader.sampler, 0, epoch) for epoch in range(2)] for loader in loaders])
        assert torch.equal(torch.get_rng_state(), before)
    assert orders[0] == orders[1]
    shuffled, generated, weighted, own = orders[0]
    assert shuffled[0] != shuffled[1] and sorted(shuffled[0]) == sorted(generated[0]) == list(range(70))
    assert len(weighted[0]) == 50 and own == [list(range(9, 0, -1))] * 2
