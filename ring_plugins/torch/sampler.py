"""A sampler that deals an epoch's samples to the ranks that are there, also after some were lost."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from ring_plugins.core.world import current


class ElasticSampler(Sampler[int]):
    """Deals each epoch's samples to all ranks, and what is left of them to the ranks that remain after a loss.

    All ranks walk through one order of the samples. Each draw takes one sample for every rank, so ranks that have drawn
    equally often stand at the same place, and need no message to deal anew: they go on with the new number of ranks.
    No sample is drawn twice in an epoch. Unseen are those that a lost rank had drawn and not averaged, among them what
    its loader had fetched ahead, and up to `size() - 1` at the end of an epoch, so that all ranks have equally many.

    Args:
        data: the dataset; its length is read at the start of each epoch.
        shuffle: whether the order is random, another one in each epoch.
        seed: of the order, equal on all ranks.
    """

    def __init__(self, data: Sized, shuffle: bool = True, seed: int = 0) -> None:
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
            topology = current().topology
            if taken + topology.size > count:
                return
            index = int(order[taken + topology.rank])
            taken += topology.size
            yield index

    def __len__(self) -> int:
        """How many samples this rank draws in an epoch in which no rank is lost from now on."""
        return len(self._data) // current().topology.size
