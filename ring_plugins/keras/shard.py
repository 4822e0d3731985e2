"""Divide data among ranks, with the same number of steps on each.

Indexable data (arrays, `PyDataset`, torch's `DataLoader`) is divided by an `Order` that every rank computes from the
same seed, so that shuffled parts never overlap. Streams (`tf.data.Dataset`, iterables) are divided by position.
TensorFlow and torch are not imported; new objects are created with the class of the given ones. The file is longer than
others because a reader wants the kinds of data side by side.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from types import FrameType
from typing import Any, Literal

import keras
import numpy as np
from keras.src.trainers.epoch_iterator import EpochIterator  # Keras 3.15.1, which does not export it

from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.groups import Group
from ring_plugins.keras.job import connect, members

Remainder = Literal["drop", "pad", "keep"]
Indices = np.ndarray[Any, np.dtype[np.int64]]

#: Attribute of every tf.data.Dataset that `shard_dataset` has returned.
_MARK = "_ring_is_divided"
#: Attribute of those whose parts may differ in length.
_KEPT = "_ring_is_kept"
#: Attribute of one from which this rank gets nothing.
_EMPTY = "_ring_is_empty"
#: Generators from which this rank got nothing.
_empty: weakref.WeakSet[Any] = weakref.WeakSet()
#: Highest epoch of data that has not been trained on: before the first epoch `fit` resets the iterator once, which
#: counts.
_NEW = 1
#: Orders of all data that is in use, by how many were made before: on all ranks, those with a number belong together.
_orders: weakref.WeakValueDictionary[int, Order] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def shard(
    data: Any,
    *,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    shuffle: bool | int | None = None,
    seed: int = 0,
    remainder: Remainder = "drop",
    group: Group | None = None,
) -> Any:
    """Return this rank's part of `data`, for `model.fit` or `model.evaluate`.

    Together the ranks see every sample once per epoch, except for the remainder. Shuffled data has a new order in each
    epoch, the same on all ranks; pass `shuffle=False` to `fit`, so that it does not shuffle again. With
    `steps_per_epoch`, an order lasts until all its samples have been seen, over as many epochs as that takes. `data`
    must be the same on all ranks.

    Args:
        data: data for `fit`:

            * arrays, or a tuple such as (x, y, sample_weight) or dict of them, of equal first dimension: of numpy,
              dense tensors, pandas (its rows by position), h5py, SciPy's sparse matrices (their batches are dense), or
              of a class whose `shape` and `[indices]` are like numpy's. Returns a `PyDataset`; in each step all ranks
              together take `batch_size` x ranks consecutive samples.
            * a `keras.utils.PyDataset` of known length. With n ranks, returns one with every n-th batch.
            * a `tf.data.Dataset` of samples or batches; with n ranks each takes every n-th element. If it was
              shuffled, it must have been with a seed.
            * a torch `DataLoader`. Returns one over the same dataset with a sampler of this package.
            * any other iterable or generator of batches, but no list, tuple, dict or string of anything else; with n
              ranks each takes every n-th.

        batch_size: samples per rank and step, for arrays only; 32 by default.
        global_batch_size: samples of a step on all ranks together, for arrays only, in place of `batch_size`: a
            multiple of the number of ranks. So a run on another number of ranks has steps of the same samples, and so
            has a `fit` with `BroadcastCallback` that goes on when ranks are lost or leave (docs/batch_size.md).
        shuffle: whether to shuffle. By default arrays and `PyDataset`s are shuffled, a `DataLoader` if it was before,
            and streams are not. For a `tf.data.Dataset`, a number is the size of the shuffle buffer; True is a buffer
            for all elements.
        seed: seed of the shuffling.
        remainder: treatment of samples (or batches) that do not fill a step of every rank. "drop" omits them, different
            ones in each epoch if shuffled; "pad" adds the first ones of the epoch; "keep" uses them, so that ranks may
            differ in the size of the last batch or in the number of steps: `fit` goes on to the end of the longest, and
            `evaluate` is exact with a `MetricAverageCallback`. With "keep", a rank for which there is nothing gets what
            is first, which counts neither in `fit` nor in `evaluate`.
        group: the ranks among which `data` is divided, all by default. Each group has all of its data.

    Raises:
        ArgumentError: the kind of data is not supported, there is too little for every rank, it is divided already, or
            an argument is invalid.
    """
    _reject_divided(data)
    if remainder not in ("drop", "pad", "keep"):
        raise ArgumentError(f'remainder={remainder!r} must be "drop", "pad" or "keep".')
    if shuffle is not None and (not isinstance(shuffle, int | np.bool_ | np.integer) or shuffle < 0):
        raise ArgumentError(f"shuffle={shuffle!r} must be True, False or, for a tf.data.Dataset, a positive number.")
    if not _is_integer(seed) or seed < 0:
        raise ArgumentError(f"seed={seed!r} must be an integer, zero or more.")
    ranks = members(group).communicator
    rank, size = connect().shard if group is None else (ranks.rank, ranks.size)
    leaves = keras.tree.flatten(data) if isinstance(data, tuple | list | dict) else [data]
    is_arrays = any(map(_is_array, leaves)) and all(leaf is None or _is_array(leaf) for leaf in leaves)
    if global_batch_size is not None:
        rank, size = ranks.rank, ranks.size
        batch_size = _share_of(global_batch_size, batch_size, type(data).__name__ if not is_arrays else "", rank, size)
    if isinstance(data, keras.utils.PyDataset):
        return ShardedBatches(data, rank, size, shuffle is not False, seed, remainder)
    if _is_from(data, "tensorflow", "DatasetV2"):
        _reject_if(remainder == "pad", remainder, "a tf.data.Dataset")
        divided = shard_dataset(data, ranks, rank, size, shuffle, seed, remainder)
        if remainder == "keep" and not any(True for _ in divided.take(1)):
            divided = data.take(1)
            setattr(divided, _EMPTY, True)
        setattr(divided, _MARK, True)
        if remainder == "keep":
            setattr(divided, _KEPT, True)
        return divided
    if _is_from(data, "torch", "DataLoader"):
        return shard_data_loader(data, rank, size, shuffle, seed, remainder)
    if is_arrays:
        per_rank = 32 if batch_size is None else batch_size
        return ShardedArrays(
            data, per_rank, rank, size, shuffle is not False, seed, remainder, global_batch_size, group
        )
    if isinstance(data, tuple | list | dict):
        kinds = {type(leaf).__name__ for leaf in leaves if not _is_array(leaf)} - {"NoneType"}
        raise ArgumentError(
            f"data is a {type(data).__name__} of {', '.join(sorted(kinds)) or 'nothing'} rather than of arrays; "
            "convert Python lists and numbers with numpy.asarray, and pass a list of batches as iter(batches)."
        )
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | set | frozenset):
        _reject_if(remainder == "pad" or bool(shuffle), remainder, "a stream, and neither is shuffle")
        return _stream(data, rank, size, remainder == "keep")
    raise ArgumentError(
        f"data={type(data).__name__} cannot be divided; pass numpy arrays, a PyDataset, a tf.data.Dataset, a "
        "DataLoader or an iterable of batches."
    )


def _share_of(global_batch_size: Any, batch_size: int | None, kind: str, rank: int, size: int) -> int:
    """A rank's samples of a step of the job.

    Args:
        kind: of the data, if it is no array.
        rank, size: which of how many ranks this is.
    """
    given = f"shard(global_batch_size={global_batch_size!r}) on rank {rank}"
    if not _is_integer(global_batch_size) or global_batch_size < 1:
        raise ArgumentError(f"{given}: that is not a positive number of samples.")
    if batch_size is not None:
        raise ArgumentError(
            f"{given} also got batch_size={batch_size}, and the number of ranks ({size}) decides how many samples each "
            "has: leave one out."
        )
    if kind:
        raise ArgumentError(
            f"{given} got data={kind}, whose batches are made already, or elsewhere: pass arrays, or make batches of "
            f"{global_batch_size} / {size} samples there."
        )
    if connect().replaces:
        raise ArgumentError(
            f'{given} with on_failure="replace": a process that takes a place in Keras does so at the end of an epoch, '
            'with the batch size of the others. Use on_failure="continue". RingStrategy(global_batch_size=...) and '
            "ring_plugins.torch.GlobalBatches go on with both."
        )
    if connect().recovers and global_batch_size >= size:  # ranks may be lost already
        return -(-int(global_batch_size) // size)
    if global_batch_size % size:
        fitting = global_batch_size - global_batch_size % size
        choices = " or ".join(str(one) for one in (fitting, fitting + size) if one)
        raise ArgumentError(f"{given} is no multiple of the number of ranks, {size}: take {choices}.")
    return int(global_batch_size) // size


def _reject_divided(data: Any) -> None:
    """Reject what `shard` returned: each rank would get a part of its own part."""
    is_generator = inspect.isgenerator(data) and data.gi_code is shard_iterable.__code__
    is_loader = isinstance(getattr(data, "sampler", None), Order)
    if is_generator or is_loader or isinstance(data, ShardedArrays | ShardedBatches) or _holds_mark(data):
        raise ArgumentError(
            f"data={type(data).__name__} was returned by shard(), so it is this rank's part already. A part of that "
            "would leave samples out; call shard once."
        )


def _holds_mark(data: Any, mark: str = _MARK) -> bool:
    """Whether this tf.data.Dataset was made from one with a mark."""
    if not _is_from(data, "tensorflow", "DatasetV2"):
        return False
    return hasattr(data, mark) or any(_holds_mark(part, mark) for part in data._inputs())


def has_equal_parts(data: Any) -> bool:
    """Whether `shard` has divided a stream of unknown length so that all ranks get equally much of it."""
    if inspect.isgenerator(data) and data.gi_code is shard_iterable.__code__:
        return data.gi_frame is None or not data.gi_frame.f_locals["keeps"]
    return _holds_mark(data) and not _holds_mark(data, _KEPT)


def is_empty(data: Any) -> bool:
    """Whether there was nothing for this rank in what `shard` has divided, so that what it reads is not to count."""
    order = order_of(data)
    return (
        (order is not None and order.is_empty)
        or _holds_mark(data, _EMPTY)
        or (inspect.isgenerator(data) and data in _empty)
    )


def continue_at(epoch: int, data: Any) -> None:
    """Let data begin with the order of an epoch, when a `fit` begins with that.

    If that is a later epoch (`initial_epoch`, `BackupAndRestore`), what has not been trained on yet does so, too: the
    script may have put it inside `data`. Streams always begin as the script made them.

    Args:
        epoch: the first epoch of this fit, from 0.
        data: what `fit` trains on. Data that a later `fit` begins with epoch 0 again goes on instead: new orders.
    """
    order = order_of(data)
    if order is not None and (epoch or order.epoch <= _NEW):
        order.begin(epoch)
    for other in list(_orders.values()) if epoch else ():
        if other is not order and other.epoch <= _NEW:
            other.begin(epoch)


def begin_epoch(data: Any, epoch: int) -> None:
    """Let data begin with the order of this epoch, if `shard` has returned it."""
    order = order_of(data)
    if order is not None:
        order.begin(epoch)


def order_of(data: Any) -> Order | None:
    """What `shard` divides data by; None if it has not divided it, or it is a stream."""
    order = getattr(data, "_order", None) or getattr(data, "sampler", None)
    return order if isinstance(order, Order) else None


def places_in_orders() -> dict[int, Any]:
    """Where all shuffled data of this rank is, for `go_on_in_orders` on a rank that takes the place of a lost one."""
    return {number: order.place for number, order in list(_orders.items()) if order.is_shuffled}


def go_on_in_orders(places: dict[int, Any]) -> None:
    """Let data go on in the orders of another rank. They cannot be told from an epoch: validation uses two each time.

    Args:
        places: `places_in_orders` of that rank. What it has made since this rank's script stands still is ignored.

    Raises:
        MismatchError: that rank has divided other data.
    """
    for number, order in list(_orders.items()):
        if number in places:
            order.go_on(places[number])


def _is_from(data: Any, package: str, name: str) -> bool:
    """Whether `data` is an instance of a package's class, without importing the package."""
    return any(kind.__name__ == name and kind.__module__.split(".")[0] == package for kind in type(data).__mro__)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and len(leaf.shape) > 0


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _by_position(array: Any) -> Any:
    """An array whose rows `_rows` can take.

    Raises:
        ArgumentError: it is a tensor whose rows cannot be taken.
    """
    kind = type(array).__name__
    if getattr(array, "layout", None) is not None and str(array.layout) != "torch.strided":
        kind = "SparseTensor"
    if kind in ("SparseTensor", "RaggedTensor") or _is_from(array, "jax", "JAXSparse"):
        raise ArgumentError(
            f"data holds a {kind}, whose rows cannot be divided here; pass a dense tensor, or a tf.data.Dataset."
        )
    if hasattr(array, "iloc"):  # pandas: [indices] would take columns, or rows by their labels
        values = array.to_numpy()
        return values[:, None] if values.ndim == 1 else values  # as Keras does with a Series
    if hasattr(array, "tocsr"):  # SciPy: other forms have no rows
        return array.tocsr()
    return np.asarray(array) if type(array).__module__.split(".")[0] == "tensorflow" else array


def _rows(array: Any, indices: Indices) -> Any:
    if isinstance(array, np.ndarray) or _is_from(array, "torch", "Tensor"):
        return array[indices]
    ordered, places = np.unique(indices, return_inverse=True)  # h5py takes rows only in ascending order
    rows = array[ordered]
    rows = rows.toarray() if hasattr(rows, "toarray") else np.asarray(rows) if hasattr(rows, "__array__") else rows
    return rows[places]


def _reject_if(wrong: bool, remainder: str, what: str) -> None:
    if wrong:
        raise ArgumentError(f'remainder={remainder!r} is not possible for {what}; use "drop".')


class Order:
    """The order of items in an epoch, the same on all ranks. Iteration yields this rank's items.

    Args:
        count: number of items.
        per_rank: items per rank and step.
        rank, size: rank of this process, and number of ranks.
        shuffle: whether each epoch has another order.
        seed: seed of the shuffling.
        remainder: "drop", "pad" or "keep".

    Raises:
        ArgumentError: a rank would get no items.
    """

    def __init__(
        self, count: int, per_rank: int, rank: int, size: int, shuffle: bool, seed: int, remainder: str
    ) -> None:
        if not _is_integer(per_rank) or per_rank < 1:
            raise ArgumentError(f"batch_size={per_rank!r} is not a positive number.")
        self._count, self._per_rank, self._rank, self._size = count, per_rank, rank, size
        self.is_shuffled, self._seed, self._remainder = shuffle, seed, remainder
        self._is_used, self.follows_ranks, self._together = False, False, per_rank * size
        self._group: Group | None = None
        self.set_epoch(0)
        if self.steps == 0:
            raise ArgumentError(
                f"data has {count} elements, too few for {size} ranks that take {per_rank} each in a step; use a "
                'smaller batch_size, or remainder="pad".'
            )
        _orders[next(_numbers)] = self

    def keep_steps(self, together: int, group: Group | None) -> None:
        """Give each step so many items, divided among the ranks that are there when it is taken."""
        self.follows_ranks, self._together, self._group = True, together, group
        self.set_epoch(0)

    def set_epoch(self, epoch: int, consumed: int = 0) -> None:
        """Compute the order of an epoch, or what is left of it behind so many items, which all ranks have had."""
        self.epoch, self.consumed = epoch, consumed
        whole = np.arange(self._count)
        if self.is_shuffled:
            np.random.default_rng((self._seed, epoch)).shuffle(whole)
        order, together = whole[consumed:], self._together
        self.steps = len(order) // together if self._remainder == "drop" else -(-len(order) // together)
        if self._remainder == "pad":
            order = np.append(order, np.resize(whole, self.steps * together - len(order)))
        self._order = order

    def begin(self, epoch: int) -> None:
        """Let the next iteration have the order of this epoch of a `fit`; see `_NEW`."""
        self._is_used = False
        self.set_epoch(epoch + _NEW)

    def end_epoch(self, caller: FrameType | None) -> None:
        """Compute the next order, unless Keras goes on with the iterator that reads this one.

        Args:
            caller: of `on_epoch_end`, maybe through a dataset of the script's own.
        """
        # Keras 3.15.1, trainers/epoch_iterator.py:97: with `steps_per_epoch`, an iterator is read to its end, over
        # several epochs. `_steps_seen` is 0 after that. An enqueuer begins anew in each epoch, whatever was read.
        while caller is not None:
            reader = caller.f_locals.get("self")
            if isinstance(reader, EpochIterator):
                is_within = reader.steps_per_epoch and reader._current_iterator is not None and reader._steps_seen
                if is_within and getattr(reader.data_adapter, "enqueuer", None) is None:
                    return
                break
            caller = caller.f_back
        self.set_epoch(self.epoch + 1)

    def behind(self, steps: int, is_over: bool = False) -> dict[str, int]:
        """Where all ranks are behind so many steps of this iteration, for `resume`.

        Args:
            is_over: whether the order ends there; without steps, whether it has ended before.
        """
        consumed = min(self.consumed + steps * self._together, self._count)
        epoch, consumed = (self.epoch + (steps > 0 or self._is_used), 0) if is_over else (self.epoch, consumed)
        return {"count": self._count, "seed": self._seed, "epoch": epoch, "consumed": consumed}

    def resume(self, place: Mapping[str, int]) -> bool:
        """Let the next iteration begin there, with as many ranks as there are now; returns whether the data is that."""
        if (place["count"], place["seed"]) != (self._count, self._seed):
            return False
        self._is_used = False
        self.set_epoch(place["epoch"], place["consumed"])
        if self.steps == 0:
            self.set_epoch(place["epoch"] + 1)
        return True

    @property
    def place(self) -> tuple[tuple[int, int], int, bool]:
        """What is ordered, and which order of that is in use."""
        return (self._count, self._seed), self.epoch, self._is_used

    def go_on(self, place: tuple[tuple[int, int], int, bool]) -> None:
        """Use the order that another rank's counterpart uses; see `go_on_in_orders`."""
        theirs, epoch, self._is_used = place
        if theirs != self.place[0]:
            raise MismatchError(
                f"shard(): data has {self._count} elements and seed={self._seed}, and on the other ranks {theirs[0]} "
                f"elements and seed={theirs[1]}. Divide the same data on all ranks, in the same sequence."
            )
        self.set_epoch(epoch)

    def step(self, number: int) -> Indices:
        """This rank's items of a step."""
        all_ranks = self._order[number * self._together : (number + 1) * self._together]
        if self.is_empty:
            return all_ranks[:1]
        rank, size = self._rank, self._size
        if self.follows_ranks:
            ranks = members(self._group).communicator
            rank, size = ranks.rank, ranks.size
        return np.array_split(all_ranks, size)[rank]

    def is_for_all(self, size: int) -> bool:
        """Whether each of so many ranks has a part of the last step."""
        return self._remainder != "keep" or len(self._order) % self._together not in range(1, size)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for this rank, which then takes the first item."""
        return self._remainder == "keep" and len(self._order) <= self._rank

    @property
    def last_size(self) -> int | None:
        """How many items this rank takes in its last step, None if these are a full batch."""
        found = len(self.step(self.own_steps - 1))
        return found if found < self._per_rank else None

    @property
    def own_steps(self) -> int:
        """Steps in which this rank takes something."""
        return self.steps - (len(self.step(self.steps - 1)) == 0)

    def __iter__(self) -> Iterator[int]:
        for number in range(self.own_steps):
            yield from self.step(number).tolist()

    def __len__(self) -> int:
        return sum(len(self.step(number)) for number in range(self.own_steps))


class ShardedArrays(keras.utils.PyDataset):
    """This rank's batches of arrays."""

    def __init__(
        self,
        arrays: Any,
        batch_size: int,
        rank: int,
        size: int,
        shuffle: bool,
        seed: int,
        remainder: str,
        global_batch_size: int | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        arrays = keras.tree.map_structure(lambda array: None if array is None else _by_position(array), arrays)
        lengths = {int(array.shape[0]) for array in keras.tree.flatten(arrays) if array is not None}
        if len(lengths) != 1:
            raise ArgumentError(f"data has arrays of different lengths {sorted(lengths)}; they must be equal.")
        self._arrays = arrays
        self._order = Order(lengths.pop(), batch_size, rank, size, shuffle, seed, remainder)
        if global_batch_size is not None:
            self._order.keep_steps(int(global_batch_size), group)

    def __len__(self) -> int:
        return self._order.own_steps

    def __getitem__(self, index: int) -> Any:
        indices = self._order.step(index)
        batch = keras.tree.map_structure(lambda array: None if array is None else _rows(array, indices), self._arrays)
        return tuple(batch) if isinstance(batch, list) else batch

    def on_epoch_end(self) -> None:
        self._order.end_epoch(sys._getframe(1))


class ShardedBatches(keras.utils.PyDataset):
    """This rank's batches of another PyDataset."""

    def __init__(self, dataset: Any, rank: int, size: int, shuffle: bool, seed: int, remainder: str) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        count = dataset.num_batches if isinstance(dataset, Sized) or hasattr(dataset, "num_batches") else None
        if count is None:
            raise ArgumentError(
                "data is a PyDataset without a length; define __len__, or pass its batches as a generator."
            )
        self._dataset = dataset
        self._order = Order(count, 1, rank, size, shuffle, seed, remainder)

    def __len__(self) -> int:
        return self._order.own_steps

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._order.step(index)[0])]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
        self._order.end_epoch(sys._getframe(1))


def shard_data_loader(loader: Any, rank: int, size: int, shuffle: bool | int | None, seed: int, remainder: str) -> Any:
    """Make a DataLoader like `loader` that yields this rank's part."""
    try:
        count = len(loader.dataset)
    except TypeError:
        if remainder == "pad" or shuffle:
            raise ArgumentError(
                "a DataLoader of an iterable dataset can be neither padded nor shuffled here."
            ) from None
        return _stream(loader, rank, size, remainder == "keep")
    if loader.batch_size is None:
        raise ArgumentError("a DataLoader with a batch_sampler cannot be divided; give it batch_size instead.")
    if shuffle is None:
        shuffle = type(loader.sampler).__name__ != "SequentialSampler"
    sampler = _EpochOrder(count, loader.batch_size, rank, size, bool(shuffle), seed, remainder)
    from ring_plugins.torch.loaders import with_sampler  # which imports torch, as whoever made the loader has

    return with_sampler(loader, sampler)


class _EpochOrder(Order):
    """A sampler that advances to the next epoch with each iteration."""

    def __iter__(self) -> Iterator[int]:
        if self._is_used:
            self.set_epoch(self.epoch + 1)
        self._is_used = True
        return super().__iter__()


def _stream(items: Iterable[Any], rank: int, size: int, keeps: bool) -> Iterator[Any]:
    """A generator that can say that it `is_empty`."""
    nothing: list[Any] = []
    found = shard_iterable(items, rank, size, keeps, lambda: _empty.add(nothing[0]()))
    nothing.append(weakref.ref(found))
    return found


def shard_iterable(
    items: Iterable[Any], rank: int, size: int, keeps: bool, say_empty: Callable[[], None]
) -> Iterator[Any]:
    """Yield every size-th item, from complete rounds only or, with `keeps`, from all; the first if there is none."""
    position, own, first, has_own = 0, None, list[Any](), False
    for item in items:
        if not first:
            first.append(item)
        if position == rank:
            own, has_own, first[0] = item, True, None
            if keeps:
                yield own
        position = (position + 1) % size
        if position == 0 and not keeps:
            yield own
    if keeps and first and not has_own:
        say_empty()
        yield first[0]


def shard_dataset(
    dataset: Any,
    ranks: Communicator[Any],
    rank: int,
    size: int,
    shuffle: bool | int | None,
    seed: int,
    remainder: str,
) -> Any:
    """Make a tf.data.Dataset of every size-th element."""
    if shuffle:
        buffer = int(dataset.cardinality()) if shuffle is True else shuffle
        if buffer < 0:
            raise ArgumentError("shuffle=True needs a dataset of known length; pass a buffer size instead.")
        dataset = dataset.shuffle(max(buffer, 1), seed=seed, reshuffle_each_iteration=True)
    _check_shuffles(dataset, ranks)
    if remainder == "keep":
        return dataset.shard(size, rank)
    length = int(dataset.cardinality())
    if 0 <= length < size:
        raise ArgumentError(f"data has {length} elements, too few for {size} ranks.")
    if length >= 0:
        return dataset.shard(size, rank).take(length // size)
    if length == -1:  # infinite
        return dataset.shard(size, rank)

    # The length is unknown: take rounds of one element per rank, without the last if it is incomplete.
    make = type(dataset).zip

    def own(*parts: Any) -> Any:
        whole = parts[0] if len(parts) == 1 and not isinstance(parts[0], dict) else make(parts)
        return whole.skip(rank).take(1)

    return dataset.window(size, drop_remainder=True).flat_map(own)


#: TensorFlow's value for `seed=None`.
UNSEEDED = (0, 0)


def seeds_of_shuffles(dataset: Any) -> list[tuple[int, int]]:
    """By which seeds a tf.data.Dataset is shuffled, maybe several times; none for any other data."""
    seeds, pending = list[tuple[int, int]](), [dataset] if _is_from(dataset, "tensorflow", "DatasetV2") else []
    while pending:
        part = pending.pop()
        pending.extend(part._inputs())
        if type(part).__name__ == "_ShuffleDataset":  # TensorFlow 2.21, data/ops/shuffle_op.py
            seeds.append((int(part._seed), int(part._seed2)))
    return seeds


def _check_shuffles(dataset: Any, ranks: Communicator[Any]) -> None:
    """Check that a dataset was shuffled in the same order on all ranks. Collective.

    Otherwise samples would be lost or duplicated silently.
    """
    seeds = seeds_of_shuffles(dataset)
    if UNSEEDED in seeds:
        raise ArgumentError(
            "data was shuffled without a seed, in a different order on each rank; pass seed to Dataset.shuffle and "
            "Dataset.list_files, or pass shuffle to shard()."
        )
    by_rank = ranks.all_gather_object(seeds, "shuffles of shard")
    if any(other != by_rank[0] for other in by_rank):
        raise MismatchError(
            f"data was shuffled with different seeds on the ranks: {by_rank}. TensorFlow includes the global seed, so "
            "pass the same to keras.utils.set_random_seed on all ranks. Dropout still differs among ranks."
        )
