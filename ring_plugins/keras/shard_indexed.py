"""Data that can be indexed, divided among ranks by one order that all of them compute alike."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import keras
import numpy as np

from ring_plugins.core.base.errors import ArgumentError

Indices = np.ndarray[Any, np.dtype[np.int64]]


class Order:
    """The order of an epoch, the same on all ranks.

    Args:
        count: of things.
        each: things that one rank takes in a step.
        rank, size: of this process.
        shuffle: whether each epoch has another order.
        seed: of the shuffling.
        remainder: "drop", "pad" or "keep".

    Raises:
        ArgumentError: a rank would get nothing.
    """

    def __init__(self, count: int, each: int, rank: int, size: int, shuffle: bool, seed: int, remainder: str) -> None:
        if each < 1:
            raise ArgumentError(f"batch_size={each!r} is not a positive number.")
        together = each * size
        self.steps = count // together if remainder == "drop" else -(-count // together)
        if self.steps == 0 or (remainder == "keep" and count < size):
            raise ArgumentError(
                f"data has {count} elements, too few for {size} ranks that take {each} each in a step; use a smaller "
                'batch_size, or remainder="pad".'
            )
        self._count, self._each, self._rank, self._size = count, each, rank, size
        self._shuffle, self._seed, self._remainder = shuffle, seed, remainder
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch = epoch
        order = np.arange(self._count)
        if self._shuffle:
            np.random.default_rng((self._seed, epoch)).shuffle(order)
        if self._remainder == "pad":
            order = np.resize(order, self.steps * self._each * self._size)
        self._order = order

    def step(self, number: int) -> Indices:
        """What this rank takes in a step: one part of what all ranks take together."""
        together = self._each * self._size
        all_ranks = self._order[number * together : (number + 1) * together]
        if len(all_ranks) == together:
            return all_ranks[self._rank * self._each : (self._rank + 1) * self._each]
        return np.array_split(all_ranks, self._size)[self._rank]

    def __iter__(self) -> Iterator[int]:
        for number in range(self.steps):
            yield from self.step(number).tolist()

    def __len__(self) -> int:
        return sum(len(self.step(number)) for number in range(self.steps))


class ShardedArrays(keras.utils.PyDataset):
    """Batches of this rank's part of arrays."""

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
