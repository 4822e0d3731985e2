"""Dividing data among ranks, with as many steps on each.

What can be indexed (arrays, `PyDataset`, torch's `DataLoader`) is divided by an `Order` that every rank computes alike
from a seed, so that shuffled parts never overlap. Streams (`tf.data.Dataset`, iterables) are divided by position.
TensorFlow and torch are not imported: what must be made is made by the class of what is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Literal

import keras
import numpy as np

from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.keras.job import connect

Remainder = Literal["drop", "pad", "keep"]
Indices = np.ndarray[Any, np.dtype[np.int64]]


def shard(
    data: Any,
    *,
    batch_size: int = 32,
    shuffle: bool | int | None = None,
    seed: int = 0,
    remainder: Remainder = "drop",
) -> Any:
    """Return this rank's part of `data`, for `model.fit` or `model.evaluate`.

    Together the ranks see every sample once in an epoch, except for the remainder. Shuffled data has a new order in
    each epoch, the same on all ranks; pass `shuffle=False` to `fit`, which need not shuffle again. `data` must be the
    same on all ranks.

    Args:
        data: what `fit` takes:

            * numpy arrays, or a tuple such as (x, y, sample_weight) or dict of them, of equal first dimension. Returns
              a `PyDataset`; in each step all ranks together take `batch_size` x ranks consecutive samples.
            * a `keras.utils.PyDataset` of known length. With n ranks, returns one that has every n-th of its batches.
            * a `tf.data.Dataset` of samples or of batches; with n ranks each takes every n-th of them. If it was
              shuffled, that must have been with a seed.
            * a torch `DataLoader`. Returns one over the same dataset with a sampler of this package.
            * any other iterable or generator of batches; with n ranks each takes every n-th.

        batch_size: samples of one rank's step, for arrays only.
        shuffle: whether to shuffle. By default arrays and `PyDataset`s are shuffled, a `DataLoader` is if it was, and
            streams are not. For a `tf.data.Dataset` a number is the size of the buffer; True means one for everything.
        seed: of the shuffling.
        remainder: what happens to samples (or batches) that do not make a step for every rank. "drop" leaves them out,
            others in each epoch if shuffled; "pad" fills up with the first of the epoch; "keep" hands them out, so that
            ranks may differ in the size of the last batch or in the number of steps. "keep" is for `evaluate` (still
            exact with a `MetricAverageCallback`), and for arrays, tf.data and DataLoaders only.

    Raises:
        ArgumentError: data of another kind, too little of it for every rank, or an argument without meaning.
    """
    if remainder not in ("drop", "pad", "keep"):
        raise ArgumentError(f'remainder={remainder!r} must be "drop", "pad" or "keep".')
    topology = connect().topology
    rank, size = topology.rank, topology.size
    if isinstance(data, keras.utils.PyDataset):
        _refuse_if(remainder == "keep", remainder, "a PyDataset")
        return ShardedBatches(data, rank, size, shuffle is not False, seed, remainder == "pad")
    if _is_from(data, "tensorflow", "DatasetV2"):
        _refuse_if(remainder == "pad", remainder, "a tf.data.Dataset")
        return shard_dataset(data, rank, size, shuffle, seed, remainder)
    if _is_from(data, "torch", "DataLoader"):
        return shard_data_loader(data, rank, size, shuffle, seed, remainder)
    if _is_of_arrays(data):
        return ShardedArrays(data, batch_size, rank, size, shuffle is not False, seed, remainder)
    if inspect.isgenerator(data) or isinstance(data, Iterable):
        _refuse_if(remainder != "drop" or bool(shuffle), remainder, "a stream, and neither is shuffle")
        return shard_iterable(data, rank, size)
    raise ArgumentError(
        f"data={type(data).__name__} cannot be divided; pass numpy arrays, a PyDataset, a tf.data.Dataset, a "
        "DataLoader or an iterable of batches."
    )


def _is_from(data: Any, package: str, name: str) -> bool:
    """Whether `data` is an instance of a class whose package need not be installed."""
    return any(kind.__name__ == name and kind.__module__.split(".")[0] == package for kind in type(data).__mro__)


def _is_of_arrays(data: Any) -> bool:
    leaves = keras.tree.flatten(data) if isinstance(data, tuple | list | dict) else [data]
    return bool(leaves) and all(leaf is None or (hasattr(leaf, "shape") and len(leaf.shape) > 0) for leaf in leaves)


def _refuse_if(wrong: bool, remainder: str, what: str) -> None:
    if wrong:
        raise ArgumentError(f'remainder={remainder!r} is not possible for {what}; use "drop".')


class Order:
    """The order of items in an epoch, the same on all ranks; iterating yields this rank's.

    Args:
        count: number of items.
        per_rank: items that one rank takes in a step.
        rank, size: of this process.
        shuffle: whether each epoch has another order.
        seed: of the shuffling.
        remainder: "drop", "pad" or "keep".

    Raises:
        ArgumentError: a rank would get nothing.
    """

    def __init__(
        self, count: int, per_rank: int, rank: int, size: int, shuffle: bool, seed: int, remainder: str
    ) -> None:
        if per_rank < 1:
            raise ArgumentError(f"batch_size={per_rank!r} is not a positive number.")
        together = per_rank * size
        self.steps = count // together if remainder == "drop" else -(-count // together)
        if self.steps == 0 or (remainder == "keep" and count < size):
            raise ArgumentError(
                f"data has {count} elements, too few for {size} ranks that take {per_rank} each in a step; use a "
                'smaller batch_size, or remainder="pad".'
            )
        self._count, self._per_rank, self._rank, self._size = count, per_rank, rank, size
        self._shuffle, self._seed, self._remainder = shuffle, seed, remainder
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Compute the order of an epoch."""
        self.epoch = epoch
        order = np.arange(self._count)
        if self._shuffle:
            np.random.default_rng((self._seed, epoch)).shuffle(order)
        if self._remainder == "pad":
            order = np.resize(order, self.steps * self._per_rank * self._size)
        self._order = order

    def step(self, number: int) -> Indices:
        """The items that this rank takes in a step: one part of those that all ranks take together."""
        together = self._per_rank * self._size
        all_ranks = self._order[number * together : (number + 1) * together]
        if len(all_ranks) == together:
            return all_ranks[self._rank * self._per_rank : (self._rank + 1) * self._per_rank]
        return np.array_split(all_ranks, self._size)[self._rank]

    def __iter__(self) -> Iterator[int]:
        for number in range(self.steps):
            yield from self.step(number).tolist()

    def __len__(self) -> int:
        return sum(len(self.step(number)) for number in range(self.steps))


class ShardedArrays(keras.utils.PyDataset):
    """This rank's batches of arrays."""

    def __init__(
        self, arrays: Any, batch_size: int, rank: int, size: int, shuffle: bool, seed: int, remainder: str
    ) -> None:
        super().__init__()
        lengths = {len(array) for array in keras.tree.flatten(arrays) if array is not None}
        if len(lengths) != 1:
            raise ArgumentError(f"data has arrays of different lengths {sorted(lengths)}; give all the same.")
        self._arrays = arrays
        self._order = Order(lengths.pop(), batch_size, rank, size, shuffle, seed, remainder)
        # The last step has fewer samples than ranks: those without one have a step less.
        steps = self._order.steps
        self._steps = steps - (len(self._order.step(steps - 1)) == 0)

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Any:
        indices = self._order.step(index)
        batch = keras.tree.map_structure(lambda array: None if array is None else array[indices], self._arrays)
        return tuple(batch) if isinstance(batch, list) else batch

    def on_epoch_end(self) -> None:
        self._order.set_epoch(self._order.epoch + 1)


class ShardedBatches(keras.utils.PyDataset):
    """This rank's batches of another PyDataset."""

    def __init__(self, dataset: Any, rank: int, size: int, shuffle: bool, seed: int, pad: bool) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        count = dataset.num_batches if isinstance(dataset, Sized) or hasattr(dataset, "num_batches") else None
        if count is None:
            raise ArgumentError(
                "data is a PyDataset without a length; give it __len__, or pass its batches as a generator."
            )
        self._dataset = dataset
        self._order = Order(count, 1, rank, size, shuffle, seed, "pad" if pad else "drop")

    def __len__(self) -> int:
        return self._order.steps

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._order.step(index)[0])]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
        self._order.set_epoch(self._order.epoch + 1)


def shard_data_loader(loader: Any, rank: int, size: int, shuffle: bool | int | None, seed: int, remainder: str) -> Any:
    """Make a DataLoader like `loader` that yields this rank's part."""
    try:
        count = len(loader.dataset)
    except TypeError:
        if remainder != "drop" or shuffle:
            raise ArgumentError(
                "a DataLoader of an iterable dataset can be neither padded nor shuffled here."
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
    """A sampler whose epoch advances each time it is iterated over."""

    _was_iterated = False

    def __iter__(self) -> Iterator[int]:
        if self._was_iterated:
            self.set_epoch(self.epoch + 1)
        self._was_iterated = True
        return super().__iter__()


def shard_iterable(items: Iterable[Any], rank: int, size: int) -> Iterator[Any]:
    """Yield every size-th item, from complete rounds only."""
    position, own = 0, None
    for item in items:
        if position == rank:
            own = item
        position += 1
        if position == size:
            yield own
            position = 0


def shard_dataset(dataset: Any, rank: int, size: int, shuffle: bool | int | None, seed: int, remainder: str) -> Any:
    """Make a tf.data.Dataset of every size-th element."""
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

    # Of unknown length: rounds of one element per rank, without the last if it is incomplete.
    make = type(dataset).zip

    def own(*parts: Any) -> Any:
        whole = parts[0] if len(parts) == 1 and not isinstance(parts[0], dict) else make(parts)
        return whole.skip(rank).take(1)

    return dataset.window(size, drop_remainder=True).flat_map(own)


def _check_shuffles(dataset: Any) -> None:
    """Check that a dataset was shuffled in the same order on all ranks; collective.

    Samples would be silently lost and doubled otherwise.
    """
    seeds: list[tuple[int, int]] = []
    pending = [dataset]
    while pending:
        part = pending.pop()
        pending.extend(part._inputs())
        if type(part).__name__ == "_ShuffleDataset":  # TensorFlow 2.21, data/ops/shuffle_op.py
            seeds.append((int(part._seed), int(part._seed2)))
    if (0, 0) in seeds:  # TensorFlow's value for seed=None
        raise ArgumentError(
            "data was shuffled without a seed, in another order on each rank; pass seed to Dataset.shuffle and "
            "Dataset.list_files, or shuffle to shard()."
        )
    by_rank = connect().communicator.all_gather_object(seeds)
    if any(other != by_rank[0] for other in by_rank):
        raise MismatchError(
            f"data was shuffled with different seeds on the ranks: {by_rank}. TensorFlow mixes the global seed in: "
            "pass the same to keras.utils.set_random_seed on all ranks too; dropout still differs among ranks."
        )
