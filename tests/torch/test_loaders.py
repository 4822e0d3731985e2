"""Loaders like a given one that draw other samples."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ring_plugins.torch import loaders


class Members:
    past_shards = frozenset({2, 3})


class World:
    shard, members = (2, 3), Members()


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def values(batches):
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("loader", [DataLoader(range(10), 3), DataLoader(Numbers(), 3), [torch.arange(3)] * 4])
@pytest.mark.parametrize("skipped", [0, 1, 3, 9])
def test_the_rest_of_an_epoch_is_what_is_left_of_the_whole(loader, skipped):
    assert values(loaders.batches_from(loader, skipped)) == values(loader)[skipped:]


def test_samples_before_the_rest_are_not_loaded():
    loaded = []

    class Dataset:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            loaded.append(index)
            return index

    assert values(loaders.batches_from(DataLoader(Dataset(), 2), 2)) == [[4, 5]] and loaded == [4, 5]


def test_a_loader_with_another_sampler_keeps_its_class_and_how_it_collates():
    class Mine(DataLoader):
        pass

    made = loaders.with_sampler(Mine(range(6), batch_size=2, collate_fn=tuple), [5, 0, 3])
    assert type(made) is Mine and list(made) == [(5, 0), (3,)]


@pytest.mark.parametrize(
    "numbers", [(2, 1), (3, 2), (3, 1), (4, 2)], ids=["another rank's", "the job's now", "of others", "never the job's"]
)
def test_a_sampler_for_other_shards_than_those_of_the_job_stays(monkeypatch, numbers):
    monkeypatch.setattr(loaders, "current", World)
    sampler = DistributedSampler(range(12), *numbers)
    loaders.divide_anew(DataLoader(range(12), sampler=sampler))
    assert (sampler.num_replicas, sampler.rank) == numbers


def test_a_sampler_divides_among_the_shards_of_a_job_that_has_grown(monkeypatch):
    world = World()
    world.shard = (1, 3)
    monkeypatch.setattr(loaders, "current", lambda: world)
    sampler = DistributedSampler(range(12), 2, 1, shuffle=False)
    loaders.divide_anew(DataLoader(range(12), sampler=sampler))
    assert list(sampler) == [1, 4, 7, 10] and len(sampler) == 4
