"""The order of an epoch: every rank's part of it, and what is left of it after an interruption."""

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler, WeightedRandomSampler

from ring_plugins.torch.order import EveryNth, rest, shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("order", [[], [4], [3, 1, 2], list(range(10, 0, -1))])
def test_rank_r_of_n_draws_every_nth_of_what_the_sampler_draws(order, size):
    shares = [EveryNth(order, size, rank) for rank in range(size)]
    drawn = [[] if share.is_empty else list(share) for share in shares]
    assert drawn == [order[rank::size] for rank in range(size)]
    for share in shares:
        assert len(list(share)) == len(share)
        if share.is_empty:  # it has something to take part with
            assert list(share) == order[:1]


def test_in_training_a_rank_without_samples_draws_none_and_gets_a_batch_that_does_not_count():
    assert [list(EveryNth([3, 4], 3, rank, may_be_empty=True)) for rank in range(3)] == [[3], [4], []]


def test_with_padding_all_ranks_have_equally_many():
    shares = [list(EveryNth([7, 8, 9, 10], 3, rank, pads=True)) for rank in range(3)]
    assert shares == [[7, 10], [8, 8], [9, 9]]


def test_a_random_sampler_draws_the_same_on_all_ranks_and_otherwise_in_each_epoch():
    def drawn(epoch, rank):
        torch.manual_seed(rank)  # ranks have drawn different random numbers
        before = torch.get_rng_state()
        share = EveryNth(WeightedRandomSampler(torch.ones(100), 100), 1, 0, seed=3)
        share.set_epoch(epoch)
        found = list(share)
        assert torch.equal(torch.get_rng_state(), before)
        return found

    assert drawn(0, 0) == drawn(0, 1) != drawn(1, 0)


def test_batches_of_a_batch_sampler_are_divided_whole_and_hear_of_epochs():
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    share = EveryNth(batches, 2, 1)
    assert list(share) == [[3, 4, 5], [9]]
    share.sampler.set_epoch(4)
    assert share.epoch == 4


@pytest.mark.parametrize("length", [0, 1, 7, 12])
def test_the_order_is_that_of_which_torch_s_sampler_gives_ranks_every_nth(length):
    for size in (1, 2, 3):
        for rank in range(size):
            sampler = DistributedSampler(range(length), size, rank, seed=3)
            sampler.set_epoch(2)
            own = rest(shuffled(length, 5), 0, rank, size)
            assert list(sampler)[: len(own)] == own


@pytest.mark.parametrize("unit", [1, 2, 3])
@pytest.mark.parametrize("consumed", [0, 5, 12])
def test_any_number_of_ranks_divides_what_is_left(consumed, unit):
    order = list("abcdefghijkl")
    for size in (1, 2, 3, 5):
        shares = [rest(order, consumed, rank, size, unit) for rank in range(size)]
        assert sorted(one for share in shares for one in share) == order[consumed:]
        assert all(share[:unit] == order[consumed + rank * unit :][:unit] for rank, share in enumerate(shares))
