"""The order of an epoch: every rank's part of it, and what is left of it after an interruption."""

import itertools

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from ring_plugins.torch.order import EveryNth, position_of, rest, resumed, shuffled, with_index


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


def test_one_rank_takes_as_many_of_a_sampler_that_never_ends_as_this_says():
    class Endless(SequentialSampler):
        def __iter__(self):
            return itertools.cycle(range(len(self)))

    assert list(EveryNth(Endless(range(3)), 1, 0, seed=None)) == [0, 1, 2]


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


def loader_of(kind, size, rank):
    """A loader of a rank in epoch 2."""
    data, own = range(23), None
    if kind in ("shuffled", "cut"):
        own = DistributedSampler(data, size, rank, seed=3, drop_last=kind == "cut")
    if kind == "sampler":
        own = EveryNth(list(range(22, -1, -1)), size, rank, may_be_empty=True)
    if kind == "random sampler":
        own = EveryNth(RandomSampler(data), size, rank, seed=1, pads=True)
    if kind == "weighted":
        own = EveryNth(WeightedRandomSampler(torch.ones(23), 23, replacement=False), size, rank, may_be_empty=True)
    if kind == "batches":
        batches = EveryNth([[i, i + 1] for i in range(0, 22, 2)] + [[22]], size, rank, may_be_empty=True)
        batches.set_epoch(2)
        return with_index(DataLoader(data), batches)
    own.set_epoch(2)
    return DataLoader(data, None if kind == "random sampler" else 2, sampler=own)


KINDS = ["shuffled", "cut", "sampler", "random sampler", "weighted", "batches"]


def drawn(loader):
    return [batch.tolist() if batch.dim() else [batch.item()] for batch in map(torch.as_tensor, loader)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batches", [1, 3])
def test_as_many_ranks_go_on_with_the_batches_that_were_left(kind, size, batches):
    for rank in range(size):
        loader = loader_of(kind, size, rank)
        whole = drawn(loader)
        found = resumed(loader_of(kind, size, rank), position_of(loader, batches, size), size)
        iter(found.loader.batch_sampler or found.loader.sampler)  # as a loader with workers does
        assert drawn(found.loader) == whole[batches:] and not found.problem
        assert drawn(found.loader) == whole  # from then on
        twice = resumed(loader_of(kind, size, rank), position_of(found.loader, 1, size, found.begun), size)
        assert drawn(twice.loader) == whole[batches + 1 :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 3), (4, 3)])
def test_another_number_of_ranks_reads_what_was_left_and_nothing_else(kind, sizes):
    before, after = sizes
    loaders = [loader_of(kind, before, rank) for rank in range(before)]
    read = [one for loader in loaders for batch in drawn(loader)[:2] for one in batch]
    position = position_of(loaders[0], 2, before)
    found = [resumed(loader_of(kind, after, rank), position, after) for rank in range(after)]
    numbers = [drawn(one.loader) for one in found]
    left = [one for batches in numbers for batch in batches for one in batch]
    assert max(map(len, numbers)) == found[0].batches and not any(one.problem for one in found)
    assert not set(read) & set(left) or kind in ("shuffled", "random sampler")  # which repeat up to after - 1
    assert len(left) - len(set(left)) + len(set(read) & set(left)) < after
    assert len(set(read + left)) == 23 if kind != "cut" else len(set(read + left)) > 23 - after
    assert [one.own for one in found] == [len(batches) for batches in numbers]
    if kind != "batches":
        assert [one.draws for one in found] == [sum(map(len, batches)) for batches in numbers]


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_data_without_a_known_order_is_dropped_and_told_or_begins_anew():
    loader = DataLoader(Numbers(), 3)
    found = resumed(loader, position_of(loader, 2, 2), 2)
    assert drawn(found.loader) == [[6, 7, 8], [9]] and "its first 2 batches are loaded and dropped" in found.problem
    found = resumed(loader, position_of(loader, 2, 2), 3)
    assert found.loader is loader and "a DataLoader of Numbers cannot be divided anew" in found.problem
    found = resumed(DataLoader(range(9), 2, shuffle=True), {"batches": 1, "ranks": 2}, 2)
    assert len(drawn(found.loader)) == 4 and "RandomSampler" in found.problem


def test_samplers_that_draw_otherwise_than_before_are_told():
    list(loader := loader_of("sampler", 2, 0))
    position = position_of(loader, 1, 2)
    other = DataLoader(range(23), 2, sampler=EveryNth(list(range(23)), 2, 0))
    assert "another order" in resumed(other, position, 2).problem
    shorter = DataLoader(range(20), 2, sampler=DistributedSampler(range(20), 2, 0))
    assert "20 samples" in resumed(shorter, position_of(loader_of("shuffled", 2, 0), 1, 2), 2).problem


@pytest.mark.parametrize("sampler", [RandomSampler(range(9)), WeightedRandomSampler(torch.ones(9), 9)])
def test_one_rank_without_a_seed_goes_on_in_the_order_that_it_drew_and_so_do_others(sampler):
    loader = DataLoader(range(9), 2, sampler=EveryNth(sampler, 1, 0, None))
    whole = drawn(loader)
    position = position_of(loader, 2, 1)
    torch.manual_seed(7)
    assert drawn(resumed(loader, position, 1).loader) == whole[2:]
    shares = [DataLoader(range(9), 2, sampler=EveryNth(sampler, 2, rank)) for rank in range(2)]
    found = [one for share in shares for batch in drawn(resumed(share, position, 2).loader) for one in batch]
    assert sorted(found) == sorted(one for batch in whole[2:] for one in batch)
