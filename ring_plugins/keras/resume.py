"""What a `fit` reads of the epoch in the middle of which it goes on: the rest, on as many ranks or on others.

What `shard` has divided by an `Order` is divided anew: the order of an epoch is the job's, and a backup says how much
of it all ranks have had. Other data (streams, arrays and datasets that the script has divided itself) goes on behind as
many batches as each rank has had, which needs as many ranks as there were, and the same batches in each run. Where that
is not so, a line says why, and the data of the epoch begins anew.

Keras has no hook for it: the iterator over the epochs (Keras 3.15.1, trainers/epoch_iterator.py) gets the number of
batches that are left, and its steps other numbers, for that epoch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from ring_plugins.keras.patches import Patch
from ring_plugins.keras.shard import UNSEEDED, order_of, seeds_of_shuffles
from ring_plugins.keras.uneven import batch_size_of

_ANEW = "so the data of this epoch begins anew, and some samples are read twice."


class Rest:
    """The data of a `fit`, and what is left of it in the epoch with which it begins.

    Args:
        iterator: of the `fit`, None if that cannot be found.
        data: what it trains on.

    Attributes:
        own: how many batches are left on this rank, None if the epoch begins with its first, or nobody knows.
        first: the number of the first step.
        problem: why the rest is not what was left, "" if it is.
    """

    def __init__(self, iterator: Any, data: Any) -> None:
        self._iterator, self._data, self._order = iterator, data, order_of(data)
        self.own: int | None = None
        self.first, self.problem = 0, ""
        self._told: Mapping[str, Any] | None = None  # until the epoch begins
        self._begun, self._left = 0, 0
        self._lengths: tuple[Any, Any] | None = None
        self._in_first_step: Callable[[], None] = _nothing
        self._patches: list[Patch] = []

    def place(self, batches: int, is_over: bool) -> dict[str, int]:
        """Where all ranks are in the data, for a backup.

        Args:
            batches: how many this epoch, or its rest, has had; 0 at its end.
            is_over: whether these are all.
        """
        if self._iterator is None:
            return {}
        if self._iterator.steps_per_epoch:  # data goes on over several epochs
            batches, count = self._iterator._steps_seen, self._iterator._num_batches
            is_over = batches == 0 or bool(count and batches >= count)
        if self._order is not None:
            return self._order.behind(batches, is_over)
        size = {} if self.size is None else {"size": self.size}
        return {"batches": 0 if is_over else self._begun + batches, **size}

    @functools.cached_property
    def size(self) -> int | None:
        """Samples of a full batch; None if nobody knows, or the data is divided by an `Order`."""
        adapter = getattr(self._iterator, "data_adapter", None)
        return batch_size_of(adapter, self._data) if self._order is None and hasattr(adapter, "batch_size") else None

    def plan(self, told: Mapping[str, Any], ranks: int, steps: int | None) -> None:
        """Take from a backup where the epoch goes on.

        Args:
            told: `epoch`, `batch`, `steps` and `ranks` of the job that has written it, and its `place` as `data`.
            ranks: of this job.
            steps: of a whole epoch, None if they are not known.
        """
        place, order, iterator = told["data"], self._order, self._iterator
        goes_on = told["batch"] or place.get("consumed") or place.get("batches")
        self.problem = self._why_not(told, ranks) if goes_on else ""
        if self.problem or iterator is None:
            return
        left = None if steps is None else steps - told["batch"]
        if iterator.steps_per_epoch and told["steps"]:
            left = -(-(told["steps"] - told["batch"]) * told["ranks"] // ranks)
        if order is not None:
            if "consumed" not in place:
                return
            epoch = order.epoch
            order.resume(place)
            self.own = 0 if order.is_empty else order.own_steps
            left = left if iterator.steps_per_epoch else order.steps
            order.set_epoch(epoch)
        elif iterator._num_batches and place.get("batches"):
            self.own = max(iterator._num_batches - place["batches"], 0)
        self._told, self._left = told, max(left or 1, 1)
        self.first = max(steps - self._left, 0) if steps and told["batch"] else told["batch"]

    def _why_not(self, told: Mapping[str, Any], ranks: int) -> str:
        adapter, place = getattr(self._iterator, "data_adapter", None), told["data"]
        kind = type(self._data).__name__
        if self._iterator is None:
            return f"a CallbackList of the script's own keeps fit() from being found, {_ANEW}"
        # Keras 3.15.1, data_adapters: those of arrays and of a PyDataset.
        if getattr(adapter, "_shuffle", False) or getattr(adapter, "shuffle", False):
            return f"fit(shuffle=True) reads x in another order in each run, {_ANEW} Pass shuffle=False, and shard(x)."
        if UNSEEDED in seeds_of_shuffles(self._data):
            return f"the tf.data.Dataset is shuffled without a seed, {_ANEW} Pass seed to Dataset.shuffle."
        if self._order is not None and "consumed" in place:
            own = self._order.behind(0)
            if any(own[name] != place[name] for name in ("count", "seed")):
                return f"shard() divides {own['count']} items, and {place['count']} before, or by another seed, {_ANEW}"
            return ""
        if "batches" not in place:
            return f"{kind} is other data than that of the backup, {_ANEW} Pass the same data in each run."
        sizes = place.get("size"), place.get("size here")
        if None not in sizes and sizes[0] != sizes[1]:
            return (
                f"batches of {kind} have {sizes[1]} samples, and {sizes[0]} before, {_ANEW} Resume with batches of "
                f"{sizes[0]}, or pass arrays to ring_plugins.keras.shard, and that to fit()."
            )
        if told["ranks"] != ranks:
            return (
                f"{kind} cannot be divided anew, and the backup is of {told['ranks']} ranks, these are {ranks}, "
                f"{_ANEW} Resume with as many ranks, or pass arrays, a PyDataset or a DataLoader to "
                "ring_plugins.keras.shard, and that to fit()."
            )
        return ""

    def begin_epoch(self) -> None:
        """Let the first epoch begin where it goes on, and later ones with their first batch. Called behind `plan`."""
        iterator, told, self._told = self._iterator, self._told, None
        if told is None:
            self._end()
            return
        self._lengths = iterator._num_batches, iterator.steps_per_epoch
        if self._order is not None:
            self._order.resume(told["data"])
        else:
            self._skip(told["epoch"], told["data"]["batches"])
        if self.own:
            iterator._num_batches = self.own
        if iterator.steps_per_epoch and told["batch"]:
            iterator.steps_per_epoch = min(self._left, iterator.steps_per_epoch)
        steps = iterator._enumerate_iterator

        def numbered() -> Iterator[tuple[int, int, Any]]:
            for begin, end, source in steps():
                self._in_first_step()
                self._in_first_step = _nothing
                yield begin + self.first, end + self.first, source

        self._patches.append(Patch(iterator, _enumerate_iterator=numbered))

    def call_in_first_step(self, function: Callable[[], None]) -> None:
        """Call this when the iteration over the rest has begun."""
        self._in_first_step = function

    def _skip(self, epoch: int, batches: int) -> None:
        """Read so many batches less of what the next iteration yields."""
        iterator, get = self._iterator, self._iterator._get_iterator
        if seeds_of_shuffles(self._data) and not iterator.steps_per_epoch:
            # Each iterator over the data draws another order. On TensorFlow, Keras makes one at an epoch's end, too.
            is_doubled = iterator._num_batches and keras.backend.backend() == "tensorflow"
            for _ in range(epoch * (2 if is_doubled else 1)):
                next(iter(get()), None)
        if not batches or self.own == 0:  # which reads a batch again, for the steps of the others
            return
        self._begun = batches

        def rest() -> Any:
            patch.restore()
            found = get()
            return found.skip(batches) if hasattr(found, "skip") else itertools.islice(found, batches, None)

        patch = Patch(iterator, _get_iterator=rest)
        self._patches.append(patch)

    def _end(self) -> None:
        """Behind the first epoch, whole ones follow, or the rest of data that goes on over several."""
        iterator = self._iterator
        self.undo()
        self.first = 0
        if self._lengths is None:
            return
        _, iterator.steps_per_epoch = self._lengths
        if not iterator.steps_per_epoch or not iterator._steps_seen:
            iterator._num_batches, _ = self._lengths
            self._lengths, self._begun = None, 0

    def undo(self) -> None:
        """Leave the iterator as Keras has made it, but for its lengths."""
        for patch in reversed(self._patches):
            patch.restore()
        self._patches = []


def _nothing() -> None:
    pass
