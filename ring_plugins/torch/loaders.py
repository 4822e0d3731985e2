"""DataLoaders like a given one that draw other samples: this rank's part of them, or those of the rest of an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from ring_plugins.core.world import current

T = TypeVar("T")


def divide_anew(loader: Any) -> None:
    """Let a `DistributedSampler` of a loader divide its data as a job does that has grown since the sampler was made.

    One that the script made for other numbers than those of its ranks stays as it is.
    """
    world = current()
    shard, shards = world.shard
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    for sampler in samplers:
        if not isinstance(sampler, DistributedSampler) or sampler.rank != shard or sampler.num_replicas == shards:
            continue
        if sampler.num_replicas in world.members.past_shards:
            fresh: DistributedSampler[Any] = DistributedSampler(
                sampler.dataset, shards, shard, sampler.shuffle, sampler.seed, sampler.drop_last
            )
            sampler.num_replicas, sampler.num_samples = shards, fresh.num_samples
            sampler.total_size = fresh.total_size


def with_sampler(loader: DataLoader[Any], sampler: Iterable[int]) -> DataLoader[Any]:
    """A loader of the same class that draws its samples by a sampler, in batches of the same size."""
    return _like(loader, batch_size=loader.batch_size, sampler=sampler, persistent_workers=loader.persistent_workers)


def from_batch(loader: DataLoader[Any], skipped: int) -> DataLoader[Any] | None:
    """A loader of the batches behind the first ones, for one epoch; None if `loader` has no sampler to skip in."""
    sampler = None if isinstance(loader.dataset, IterableDataset) else loader.batch_sampler
    return None if sampler is None else _like(loader, DataLoader, batch_sampler=_Rest(sampler, skipped))


def batches_from(loader: Iterable[T], skipped: int) -> Iterator[T]:
    """The batches of a loader behind the first ones, which are not loaded if it is torch's with a sampler."""
    if not skipped:
        return iter(loader)
    rest = from_batch(loader, skipped) if isinstance(loader, DataLoader) else None
    return itertools.islice(loader, skipped, None) if rest is None else iter(rest)


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


class _Rest(Sampler[list[int]]):
    """The batches of a sampler behind the first ones."""

    def __init__(self, sampler: Iterable[list[int]], skipped: int) -> None:
        self._sampler, self._skipped = sampler, skipped

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self._sampler, self._skipped, None)

    def __len__(self) -> int:
        return max(len(self._sampler) - self._skipped, 0)  # type: ignore[arg-type]
