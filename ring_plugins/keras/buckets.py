"""Average gradients in buckets, as numpy arrays from a framework's host calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ring_plugins.core.arrays.arithmetic import narrow, widen
from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.arrays.result_memory import LentMemory
from ring_plugins.core.base.errors import MismatchError, RingError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.validation import rejections_told
from ring_plugins.core.gradients.fusion import Bucket, BucketSizes, Entry, FusionBuffer, FusionPlan
from ring_plugins.core.gradients.reducer import GradientReducer
from ring_plugins.core.gradients.trials import Wanted, choose_compression, choose_overlap, chosen_overlap
from ring_plugins.core.linux.thread_count import threads_in_use
from ring_plugins.core.world import check_tried, has_room_to_overlap, node_rank, replaces
from ring_plugins.keras.consistency import KerasChecks
from ring_plugins.observe.consistency import COUNT, bits_of, check_equal_after_losses, checksum, differ
from ring_plugins.observe.same_samples import tell_if_same

T = TypeVar("T")

#: The bits of 1.0; numpy stores bfloat16 as uint16.
_ONE_BFLOAT16 = 0x3F80
_NOTHING = np.empty(0)
#: Bits of the number of a batch's samples.
_SAMPLE_BITS = 32


class HostBuckets:
    """Averages the gradients of one optimizer through host memory.

    Small gradients are copied into buckets. Large ones are read in the framework's memory, and with `in_place` their
    averages overwrite them. Otherwise all averages go to memory that is not written again while anybody refers to it:
    the framework may read the gradient elsewhere too, and a variable may adopt the average, as TensorFlow's do.

    A pass is any number of calls of `give` and one of `finish`. A bucket is reduced as soon as all gradients in it and
    in the previous buckets were given, or without overlap by `finish`. A missing gradient counts as zeros.

    Args:
        entries: all gradients in the order of the model's variables.
        communicator: reduces them; must have no other use.
        sizes: sizes of the buckets, and of gradients that are too large for them.
        compression: as the user asks; None sends gradients as they are.
        in_place: whether large gradients may be overwritten.
        overlap: whether buckets are reduced while others are still to come; see `choose_overlap`.
        checks: what passes compare among the ranks.

    Construction is collective.

    Attributes:
        checks: as given.
        counted: samples of this rank that count in the pass, and those of a full batch; None if ranks weigh alike. They
            must be integers below 2 ** 32: their bits travel, which 16-bit floats can tell, too.
        ended: share of the ranks that had run out of data in the last pass.

    Raises:
        MismatchError: the entries differ among ranks.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        communicator: Communicator,
        sizes: BucketSizes,
        compression: Compression | None = None,
        in_place: bool = False,
        overlap: Wanted = "auto",
        checks: KerasChecks | None = None,
    ) -> None:
        if compression is not None:
            entries = [replace(entry, layout=f"{entry.layout}, {compression}") for entry in entries]
        self.plan = FusionPlan(entries, sizes, COUNT + _SAMPLE_BITS + 1)  # see `observe.consistency`
        self.plan.check_equal(communicator)
        self.checks = checks or KerasChecks()
        self._buffer = FusionBuffer(self.plan, communicator)
        if replaces():  # a process that joins has seen none of the steps that "auto" measures
            overlap = chosen_overlap(overlap) is True
        has_room = has_room_to_overlap(threads_in_use())
        chosen = choose_overlap(overlap, has_room, communicator)
        check_tried(compression)
        rounding = choose_compression(compression, node_rank(), communicator)
        self.reducer = GradientReducer(self._buffer, communicator, compression=rounding, overlap=chosen)
        self._communicator, self._in_place = communicator, in_place
        self.counted: tuple[int, int] | None = None
        self._factor, self.ended = 1.0, 0.0
        self._first: int | None = None if replaces() else 0  # the sum of this rank's own gradients of the first pass
        self._given: dict[int, Array] = {}
        self._forms: dict[int, tuple[np.dtype[Any], tuple[int, ...]]] = {}  # of all gradients of this pass
        self._last_forms = self._forms  # of the one before
        #: The average of each entry: a part of a bucket, or for a large gradient memory that is set in each pass.
        self._averages: list[Array] = [_NOTHING] * len(entries)
        self._flags: list[Array] = []
        self._lent_buckets = [LentMemory(b.flags * STORAGE[b.dtype].itemsize) for b in self.plan.buckets]
        self._lent: dict[int, LentMemory] = {}  # by large entry
        for bucket, memory in zip(self.plan.buckets, self._buffer.memories, strict=True):
            self._flags.append(memory.array[bucket.flags : bucket.flags + len(bucket.entries)])
            for i, offset in zip(bucket.entries, bucket.offsets, strict=True):
                count = entries[i].count
                if i not in bucket.direct:
                    self._averages[i] = memory.array[offset : offset + count]
                elif not in_place:
                    self._lent[i] = LentMemory(count * memory.array.itemsize)
        last = self.plan.buckets[-1]
        start = last.flags + len(last.entries)
        self._control: Array = self._buffer.memories[-1].array[start : start + COUNT]
        self._samples: Array = self._buffer.memories[-1].array[start + COUNT : start + COUNT + _SAMPLE_BITS]
        self._has_ended: Array = self._buffer.memories[-1].array[start + COUNT + _SAMPLE_BITS :][:1]

    def take(self, rate: float | None, samples: int, full: int) -> None:
        """Note before a pass its learning rate, to be compared, and which part of a full batch counts."""
        if rate is not None:
            self.checks.rates.take(rate)
        self.counted = (samples, full) if full else None

    def factor(self) -> float:
        """By which averages of the ranks were multiplied in the last pass, to be those of the samples that came."""
        return self._factor

    def give(self, indices: Sequence[int], gradients: Sequence[Array]) -> None:
        """Add gradients that are complete.

        Each is released as soon as it has been read, at the latest when `finish` returns. If that was the last
        reference, the framework reuses its memory for the next gradient instead of allocating more.
        """
        if not self._forms.keys().isdisjoint(indices):
            error = RingError(
                f"{self.plan.entries[indices[0]].name} got a second gradient before the averages of the first: an "
                "exception ended a step after this rank had begun to send its gradients, and the script caught it. "
                "The other ranks must not step on them."
            )
            self._communicator.interrupt("a step", error)
            raise error
        with rejections_told(self._communicator, "filling buckets"):
            for i, gradient in zip(indices, gradients, strict=True):
                self._given[i], self._forms[i] = gradient, (gradient.dtype, gradient.shape)
            if self._first is not None:  # before averages overwrite them
                self._first += sum((i + 1) * checksum(gradient) for i, gradient in zip(indices, gradients, strict=True))
            for i in indices:
                self.reducer.mark_ready(i, self._fill)

    def finish(self) -> dict[int, Array]:
        """Wait for every bucket.

        Returns:
            The average for each given index, with the gradient's shape and dtype, aligned. With `in_place` it is the
            gradient itself if that is large, and otherwise memory that the next pass overwrites.

        Raises:
            MismatchError, DriftError: a variable has a gradient on some ranks only, or the checks say so.
            PeerFailed: another rank is gone.
        """
        forms = self._forms
        try:
            with rejections_told(self._communicator, "filling buckets"):
                self.reducer.finish(self._fill)
        finally:
            self._given, self._forms, self._last_forms = {}, {}, forms
        self._check_flags(forms)
        self.ended = float((_widened(self._has_ended) if self._has_ended.dtype == np.uint16 else self._has_ended)[0])
        self.checks.note_compared()
        if differ(self._control.tolist()):
            self.checks.say(self._communicator)
        if self._first is not None:
            first, self._first = self._first, None
            if self.counted is not None:  # in a `fit` that joins ranks, so that all are in their first pass
                tell_if_same(first if self.counted[0] else 0, self._communicator)
        if self.checks.follow_members():
            names = [entry.name for entry in self.plan.entries]
            check_equal_after_losses(
                lambda: (names, [checksum(average) for average in self._averages]), self._communicator
            )
        self._weigh()
        averages = self._averages if self._in_place else self._handed_out()
        return {i: averages[i].view(dtype).reshape(shape) for i, (dtype, shape) in forms.items()}

    def take_part(self) -> bool:
        """Take part in a pass of others with zeros for what this rank gave last, once it has run out of data.

        Returns:
            Whether all ranks have run out, so that this was the last pass.
        """
        self.checks.has_ended = True
        try:
            forms = self._last_forms
            self.give([*forms], [np.zeros(shape, dtype) for dtype, shape in forms.values()])
            self.finish()
        finally:
            self.checks.has_ended = False
        return self.ended > 1 - 0.5 / self._communicator.size

    def _weigh(self) -> None:
        """Turn averages over all ranks into those over the samples that came."""
        self._factor = 1.0
        if self.counted is None:
            return
        size, full = self._communicator.size, self.counted[1]
        shares = self._samples if self._samples.dtype != np.uint16 else _widened(self._samples)
        came = sum(round(float(share) * size) << bit for bit, share in enumerate(shares))
        if came in (0, size * full):  # none came if those have been lost that had more batches
            return
        self._factor = size * full / came
        for average in self._averages:
            if average.dtype == np.uint16:
                values = _widened(average)
                narrow(values * np.float32(self._factor), average, "bfloat16")
            else:
                np.multiply(average, average.dtype.type(self._factor), out=average)

    def _handed_out(self) -> list[Array]:
        """The averages of this pass, in memory that belongs to whoever gets them."""
        averages = list(self._averages)
        for i in self._lent:
            self._averages[i] = _NOTHING
        for bucket, lent in zip(self.plan.buckets, self._lent_buckets, strict=True):
            if not bucket.flags:
                continue
            memory = self._buffer.memories[bucket.index].array[: bucket.flags]
            copy = lent.new().view(memory.dtype)
            np.copyto(copy, memory)
            for i, offset in zip(bucket.entries, bucket.offsets, strict=True):
                if offset >= 0:
                    averages[i] = copy[offset : offset + self.plan.entries[i].count]
        return averages

    def release(self) -> None:
        """Release the memory."""
        self._buffer.release()

    def _fill(self, bucket: Bucket) -> list[HostMemory]:
        """Copy the small gradients of a bucket into it; return the memory of the large ones."""
        flags = self._flags[bucket.index]
        storage = STORAGE[bucket.dtype]
        one = _ONE_BFLOAT16 if bucket.dtype == "bfloat16" else 1
        if bucket.index == len(self.plan.buckets) - 1:
            if self.checks.has_ended:
                self._control[...] = 0  # neither a bit nor its inverse, so it differs from nobody
            else:
                self._control[...] = bits_of(self.checks.number())
                self._control *= one
            self._has_ended[...] = one * self.checks.has_ended
            counted = 0 if self.counted is None else self.counted[0]
            bits = np.unpackbits(np.array([counted], "<u4").view(np.uint8), bitorder="little")
            self._samples[...] = bits
            self._samples *= one
        direct: list[HostMemory] = []
        for position, i in enumerate(bucket.entries):
            gradient = self._given.pop(i, None)
            flags[position] = 0 if gradient is None else one
            if i not in bucket.direct:
                average = self._averages[i]
                if gradient is None:
                    average[...] = 0
                else:
                    np.copyto(average.reshape(gradient.shape), gradient.view(storage))
            elif self._in_place:
                count = self.plan.entries[i].count
                self._averages[i] = np.zeros(count, storage) if gradient is None else gradient.view(storage)
                direct.append(HostMemory(self._averages[i], bucket.dtype))
            else:
                self._averages[i] = average = self._lent[i].new().view(storage)
                source = None
                if gradient is None:
                    average[...] = 0
                else:
                    source = np.ascontiguousarray(gradient).view(storage).reshape(-1)
                direct.append(HostMemory(average, bucket.dtype, source))
        return direct

    def _check_flags(self, given: Container[int]) -> None:
        """Check that all ranks gave gradients for the same variables; otherwise their weights would diverge.

        The averages of equal flags are 0 and 1 exactly (see `hierarchical.average_divisors`).
        """
        for bucket, flags in zip(self.plan.buckets, self._flags, strict=True):
            one = _ONE_BFLOAT16 if bucket.dtype == "bfloat16" else 1
            for i, flag in zip(bucket.entries, flags.tolist(), strict=True):
                if flag != (one if i in given else 0):
                    raise unequal_gradients(i in given, self.plan.entries[i].name)


def call_weakly(method: Callable[..., T]) -> Callable[..., T]:
    """A function that calls a method, but does not keep its object.

    TensorFlow and XLA never let go of a function that a compiled step calls.
    """
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> T:
        found = weak()
        if found is None:
            raise RingError(
                "this compiled step averages with an optimizer that does so no longer, since its fit() is over or "
                "undistribute() was called. Compile the step anew: model.make_train_function(force=True)."
            )
        return found(*args)

    return call


def _widened(half: Array) -> Array:
    values = np.empty(half.shape, np.float32)
    widen(half, values, "bfloat16")
    return values


def unequal_gradients(is_here: bool, name: str) -> MismatchError:
    """The error for a variable that has a gradient on some ranks only."""
    return MismatchError(
        f"this rank has {'a' if is_here else 'no'} gradient for {name}, unlike other ranks. All ranks must compute "
        "gradients for the same variables in the same step."
    )
