"""Data that comes one after the other, or that its own framework indexes.

No framework is imported: what must be made is made by the class of what is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.keras.connection import connect
from ring_plugins.keras.shard_indexed import Order


def shard_iterable(items: Iterable[Any], rank: int, size: int) -> Iterator[Any]:
    """Every size-th item, of as many whole rounds as there are."""
    position, own = 0, None
    for item in items:
        if position == rank:
            own = item
        position += 1
        if position == size:
            yield own
            position = 0


def shard_dataset(dataset: Any, rank: int, size: int, shuffle: bool | int | None, seed: int, remainder: str) -> Any:
    """A tf.data.Dataset of every size-th element."""
    if shuffle:
        buffer = int(dataset.cardinality()) if shuffle is True else shuffle
        if buffer < 0:
            raise ArgumentError("shuffle=True needs a dataset of known length; pass the size of a buffer instead.")
        dataset = dataset.shuffle(max(buffer, 1), seed=seed, reshuffle_each_iteration=True)
    _check_shuffles(dataset)
    if remainder == "keep":
        return dataset.shard(size, rank)
    length = int(dataset.cardinality())
    if 0 <= length < size:
        raise ArgumentError(f"data has {length} elements, too few for {size} ranks.")
    if length >= 0:
        return dataset.shard(size, rank).take(length // size)
    if length == -1:  # infinite
        return dataset.shard(size, rank)

    # Of unknown length: rounds of one element a rank, the last incomplete one left out.
    make = type(dataset).zip

    def own(*parts: Any) -> Any:
        whole = parts[0] if len(parts) == 1 and not isinstance(parts[0], dict) else make(parts)
        return whole.skip(rank).take(1)

    return dataset.window(size, drop_remainder=True).flat_map(own)


def _check_shuffles(dataset: Any) -> None:
    """Refuse a dataset that was shuffled in another order on each rank; collective.

    Samples would be lost and doubled without a sign.
    """
    seeds: list[tuple[int, int]] = []
    pending = [dataset]
    while pending:
        part = pending.pop()
        pending.extend(part._inputs())
        if type(part).__name__ == "_ShuffleDataset":  # TensorFlow 2.21, data/ops/shuffle_op.py
            seeds.append((int(part._seed), int(part._seed2)))
    if (0, 0) in seeds:  # what TensorFlow makes of seed=None
        raise ArgumentError(
            "data was shuffled without a seed, in another order on each rank; pass seed to Dataset.shuffle and "
            "Dataset.list_files, or shuffle to shard()."
        )
    everyones = connect().communicator.all_gather_object(seeds)
    if any(other != everyones[0] for other in everyones):
        raise MismatchError(
            f"data was shuffled with different seeds on the ranks: {everyones}. TensorFlow mixes the global "
            "seed in: pass the same everywhere to keras.utils.set_random_seed too; dropout differs all the same."
        )


def shard_data_loader(loader: Any, rank: int, size: int, shuffle: bool | int | None, seed: int, remainder: str) -> Any:
    """A DataLoader like `loader` that gives this rank's part."""
    try:
        count = len(loader.dataset)
    except TypeError:
        if remainder != "drop" or shuffle:
            raise ArgumentError(
                "a DataLoader of an iterable dataset can neither be padded nor shuffled here."
            ) from None
        return shard_iterable(loader, rank, size)
    if loader.batch_size is None:
        raise ArgumentError("a DataLoader with a batch_sampler cannot be divided; give it batch_size instead.")
    if shuffle is None:
        shuffle = type(loader.sampler).__name__ != "SequentialSampler"
    sampler = _EpochOrder(count, loader.batch_size, rank, size, bool(shuffle), seed, remainder)
    return type(loader)(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


class _EpochOrder(Order):
    """A sampler: an epoch further each time it is walked through."""

    _walked = False

    def __iter__(self) -> Iterator[int]:
        if self._walked:
            self.set_epoch(self.epoch + 1)
        self._walked = True
        return super().__iter__()
