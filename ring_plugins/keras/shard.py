"""Every rank its own part of the data, as many steps on each."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Literal

import keras

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.keras.connection import connect
from ring_plugins.keras.shard_indexed import ShardedArrays, ShardedBatches
from ring_plugins.keras.shard_streams import shard_data_loader, shard_dataset, shard_iterable

Remainder = Literal["drop", "pad", "keep"]


def shard(
    data: Any,
    *,
    batch_size: int = 32,
    shuffle: bool | int | None = None,
    seed: int = 0,
    remainder: Remainder = "drop",
) -> Any:
    """This rank's part of `data`, to be handed to `model.fit` or `model.evaluate`.

    Together the ranks see every sample once in an epoch, but for the remainder. Shuffling is anew in each epoch and
    the same on all ranks, whose parts therefore never overlap; hand `shuffle=False` to `fit`, which needs not shuffle
    again. `data` must be the same on all ranks.

    Args:
        data: what `fit` takes:

            * numpy arrays, or a tuple such as (x, y, sample_weight) or dict of them, of equal first dimension. Gives a
              `PyDataset`; one step of all ranks together takes `batch_size` x ranks consecutive samples.
            * a `keras.utils.PyDataset` of known length. Gives one that has each ranks-th of its batches.
            * a `tf.data.Dataset`, of samples or of batches; each rank takes every ranks-th of them. What is shuffled
              before must have been shuffled with a seed.
            * a torch `DataLoader`. Gives one with a sampler of this package over the same dataset.
            * any other iterable or generator, of batches; each rank takes every ranks-th.

        batch_size: samples of one rank's step, for arrays only.
        shuffle: whether to shuffle; by default arrays and `PyDataset`s are, a `DataLoader` is if it was, and streams
            are not. For a `tf.data.Dataset` a number is the size of the buffer, True one that holds everything.
        seed: of the shuffling.
        remainder: what becomes of samples (or batches) that do not make a step for every rank. "drop" leaves them out,
            others in every epoch where shuffled; "pad" fills up with the first of the epoch; "keep" hands them out,
            so that ranks may differ in the size of the last batch or in the number of steps, which is for
            `evaluate` (with a `MetricAverageCallback` still exact), and arrays, tf.data and DataLoaders only.

    Raises:
        ArgumentError: data of another kind, too little of it for every rank, or an argument without meaning.
    """
    if remainder not in ("drop", "pad", "keep"):
        raise ArgumentError(f'remainder={remainder!r} must be "drop", "pad" or "keep".')
    place = connect().topology
    rank, size = place.rank, place.size
    if isinstance(data, keras.utils.PyDataset):
        _refuse(remainder == "keep", remainder, "a PyDataset")
        return ShardedBatches(data, rank, size, shuffle is not False, seed, remainder == "pad")
    if _is_from(data, "tensorflow", "DatasetV2"):
        _refuse(remainder == "pad", remainder, "a tf.data.Dataset")
        return shard_dataset(data, rank, size, shuffle, seed, remainder)
    if _is_from(data, "torch", "DataLoader"):
        return shard_data_loader(data, rank, size, shuffle, seed, remainder)
    if _is_of_arrays(data):
        return ShardedArrays(data, batch_size, rank, size, shuffle is not False, seed, remainder)
    if inspect.isgenerator(data) or isinstance(data, Iterable):
        _refuse(remainder != "drop" or bool(shuffle), remainder, "a stream (or shuffle it)")
        return shard_iterable(data, rank, size)
    raise ArgumentError(
        f"data={type(data).__name__} cannot be divided; pass numpy arrays, a PyDataset, a tf.data.Dataset, a "
        "DataLoader or an iterable of batches."
    )


def _is_from(data: Any, package: str, name: str) -> bool:
    """Whether `data` is of a class of a package that need not be installed."""
    return any(kind.__name__ == name and kind.__module__.split(".")[0] == package for kind in type(data).__mro__)


def _is_of_arrays(data: Any) -> bool:
    leaves = keras.tree.flatten(data) if isinstance(data, tuple | list | dict) else [data]
    return bool(leaves) and all(leaf is None or (hasattr(leaf, "shape") and len(leaf.shape) > 0) for leaf in leaves)


def _refuse(wrong: bool, remainder: str, what: str) -> None:
    if wrong:
        raise ArgumentError(f'remainder={remainder!r} is not possible for {what}; use "drop".')
