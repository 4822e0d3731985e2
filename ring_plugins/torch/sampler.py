"""A sampler that divides an epoch's samples among the ranks, and after a loss the rest among those that remain."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.world import current


class ElasticSampler(Sampler[int]):
    """Divides each epoch's samples among all ranks, and when ranks are lost, the rest among those that remain.

    All ranks go through the samples in one order, and each draw takes one sample for every rank. So ranks that have
    drawn equally often are at the same place, and after a loss they go on with the new number of ranks, without a
    message. No sample is drawn twice in an epoch. Two kinds of samples are not trained on: one batch of each lost rank,
    for the step without it that the others had begun, with those that its loader had fetched ahead; and up to
    `size() - 1` at the end of an epoch, so that all ranks have equally many.

    With `on_failure="replace"`, the samples of a lost rank wait for the process that takes its place instead. Those of
    the steps until then are not trained on. If the job grows, the added ranks have shards of the next epoch.

    Args:
        data: the dataset; its length is read at the start of each epoch.
        shuffle: whether the order is random, and differs in each epoch for which `set_epoch` is called.
        seed: seed of the order, equal on all ranks.
    """

    def __init__(self, data: Sized, shuffle: bool = True, seed: int = 0) -> None:
        if not isinstance(data, Sized):
            raise ArgumentError(f"data={type(data).__name__} has no length, so it cannot be divided among the ranks.")
        self._data = data
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch that begins; call it on all ranks before the loader is iterated over."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        count, taken = len(self._data), 0
        order = torch.arange(count)
        if self._shuffle:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(self._seed + self._epoch))
        while True:
            # Read at each draw: they change in the middle of an epoch, on all ranks in the same operation.
            shard, shards = current().shard
            if taken + shards > count:
                return
            index = int(order[taken + shard])
            taken += shards
            yield index

    def __len__(self) -> int:
        """How many samples this rank draws in an epoch in which no rank is lost from now on."""
        return len(self._data) // current().shard[1]
