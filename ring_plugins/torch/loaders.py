"""A sampler that divides an epoch among the ranks, and DataLoaders like a given one that draw other samples."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.world import current
from ring_plugins.torch.order import resumed, shuffled

T = TypeVar("T")


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
        self._begin = 0
        #: Of this iteration, where the number of shards changes: draws until then, samples of all ranks, and shards.
        self._steps = [(0, 0, 1)]

    @property
    def whole(self) -> Sampler[int]:
        """The sampler of the order that all ranks go through."""
        return (RandomSampler if self._shuffle else SequentialSampler)(self._data)

    @property
    def drawn_by(self) -> int:
        """What the order of this epoch is drawn by."""
        return self._seed + self._epoch

    def begin_at(self, consumed: int) -> None:
        """Let the next iteration begin behind so many samples of the order, which all ranks together have drawn."""
        self._begin = consumed

    def consumed(self, draws: int) -> int:
        """How many samples all ranks together have drawn when this one has drawn so many in this iteration."""
        drawn, taken, shards = [step for step in self._steps if step[0] <= draws][-1]
        return taken + (draws - drawn) * shards

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch that begins; call it on all ranks before the loader is iterated over."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        count, taken, self._begin = len(self._data), self._begin, 0
        order = shuffled(count, self._seed + self._epoch) if self._shuffle else range(count)
        drawn, self._steps = 0, [(0, taken, current().shard[1])]
        while True:
            # Read at each draw: they change in the middle of an epoch, on all ranks in the same operation.
            shard, shards = current().shard
            if taken + shards > count:
                return
            if shards != self._steps[-1][2]:
                self._steps.append((drawn, taken, shards))
            index = order[taken + shard]
            taken, drawn = taken + shards, drawn + 1
            yield index

    def __len__(self) -> int:
        """How many samples this rank draws in an epoch in which no rank is lost from now on."""
        return len(self._data) // current().shard[1]


def divide_anew(loader: Any) -> None:
    """Let a `DistributedSampler` of a loader divide its data as a job does that has grown since the sampler was made.

    One that the script made for other numbers than those of its ranks stays as it is.
    """
    world = current()
    shard, shards = world.shard
    for sampler in samplers_of(loader):
        if not isinstance(sampler, DistributedSampler) or sampler.rank != shard or sampler.num_replicas == shards:
            continue
        if sampler.num_replicas in world.members.past_shards:
            fresh: DistributedSampler[Any] = DistributedSampler(
                sampler.dataset, shards, shard, sampler.shuffle, sampler.seed, sampler.drop_last
            )
            sampler.num_replicas, sampler.num_samples = shards, fresh.num_samples
            sampler.total_size = fresh.total_size


def samplers_of(loader: Any) -> list[Any]:
    """What chooses a loader's samples, as Lightning 2.6.6 finds it too (fabric/utilities/data.py:415)."""
    found = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def with_sampler(loader: DataLoader[Any], sampler: Iterable[int]) -> DataLoader[Any]:
    """A loader of the same class that draws its samples by a sampler, in batches of the same size."""
    return _like(loader, batch_size=loader.batch_size, sampler=sampler, persistent_workers=loader.persistent_workers)


def batches_from(loader: Iterable[T], skipped: int) -> Iterator[T]:
    """The batches of a loader behind the first ones, which are not loaded if it is torch's with a sampler."""
    return iter(resumed(loader, {"batches": skipped, "ranks": 1}, 1).loader if skipped else loader)


def checksum_of(batch: Any) -> int:
    """What tells a batch from others, by its tensors; 0 if it has none but zeros."""
    found = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.count_nonzero():
            found = zlib.crc32(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy(), found)
    return found


def _like(loader: DataLoader[Any], kind: type[DataLoader[Any]] | None = None, **sampling: Any) -> DataLoader[Any]:
    return (kind or type(loader))(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        **sampling,
    )
