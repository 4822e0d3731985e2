"""Reduces the buckets of a pass: while backward still computes other gradients, or synchronously at its end."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from time import monotonic_ns
from types import MethodType
from typing import Any

from ring_plugins.core.arrays.codec import Compression, HalfCodec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory, Memory
from ring_plugins.core.base.errors import MembersLost
from ring_plugins.core.collectives.api import Communicator, Work
from ring_plugins.core.gradients.fusion import Bucket, BucketMemory, FusionPlan
from ring_plugins.core.gradients.repetition import SavedInputs
from ring_plugins.core.gradients.trials import ALWAYS, Overlap
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.trace.steps import steps

#: Prepares a bucket and returns the memory of its direct tensors.
Fill = Callable[[Bucket], Sequence[Memory] | None]


class GradientReducer:
    """Launches the reduction of each bucket as soon as all its gradients, and all earlier buckets, are ready.

    Without overlap, `finish` reduces all buckets in the calling thread instead, by one operation (see `trials`).

    Buckets are launched in the order of the plan on every rank, whatever order gradients become ready in, so that ranks
    never have to ask each other what comes next. A pass begins with the first `mark_ready` and ends with `finish`,
    which launches the buckets that are left. For a gradient that never became ready, `fill` decides what is sent.

    Where ranks may be lost, a pass is repeated as a whole after a loss (see `repetition`), in the same way.

    Args:
        buffer: the buckets' memory.
        communicator: reduces it. Nobody else may use it, so that operations keep the order of the buckets.
        fill: called once a pass for every bucket, before its launch, to copy its gradients into the memory; returns the
            memory of the bucket's direct tensors, or nothing if it has none. A method is held weakly, since its object
            holds this one, and a cycle would keep the memory until the next garbage collection.
        op: the reduction.
        compression: how host memory is compressed between hosts; None sends it as it is.
        holds_last: whether the last bucket always waits for `launch_rest`, which tells that backward has not raised.
        overlap: tells in every pass whether reductions overlap backward, the same on all ranks; they do by default.

    Attributes:
        overlaps: whether reductions overlap the computation of gradients in this pass.
        holds: whether buckets wait for `launch_rest` even if they are complete.
        waited: seconds that `finish` waited for reductions, or ran them.
        reduced_bytes: bytes reduced.
        passes: passes finished.
        kept: what `fill` may tell how to restore a bucket; None where no rank may be lost.
        is_under_way: whether a pass has begun and not been finished.
    """

    def __init__(
        self,
        buffer: BucketMemory,
        communicator: Communicator[Any],
        fill: Fill,
        op: Op = Op.AVERAGE,
        compression: Compression | None = None,
        holds_last: bool = False,
        overlap: Overlap | None = None,
    ) -> None:
        self._buffer, self._communicator, self._op = buffer, communicator, op
        self._fill = weakref.WeakMethod(fill) if isinstance(fill, MethodType) else lambda: fill
        self._buckets = buffer.plan.buckets
        self._early = len(self._buckets) - holds_last
        self._compression = compression
        self._codecs: dict[tuple[int, int], HalfCodec] = {}
        self._descriptions = [_describe([bucket], buffer.plan) for bucket in self._buckets]
        self._description = _describe(self._buckets, buffer.plan)  # of all buckets, reduced as one
        self._bucket_of = [0] * len(buffer.plan.entries)
        for bucket in self._buckets:
            for entry in bucket.entries:
                self._bucket_of[entry] = bucket.index
        self.kept = SavedInputs() if communicator.recovers else None
        self._overlap = overlap or ALWAYS
        self.overlaps = self._overlap.now
        self.holds = False
        self.waited = 0.0
        self.reduced_bytes = 0
        self.passes = 0
        self._start_pass()

    def _start_pass(self) -> None:
        self.is_under_way = False
        if self.kept is not None:
            self.kept.clear()
        self._ready = bytearray(len(self._bucket_of))
        self._missing = [len(bucket.entries) for bucket in self._buckets]
        self._next = 0
        self._works: list[Work[None]] = []  # none for buckets that are reduced synchronously
        self._bytes_before = self.reduced_bytes
        self._ready_at: dict[int, int] = {}  # by bucket, while the recorder is on
        self._first_ready_at = 0

    def is_launched(self, entry: int) -> bool:
        """Whether the bucket of this gradient is already being reduced."""
        return self._bucket_of[entry] < self._next

    def has_left(self, bucket: int) -> bool:
        """Whether this bucket is already being reduced."""
        return bucket < self._next

    def mark_ready(self, entry: int) -> bool:
        """Note that a gradient is complete; marking it twice changes nothing.

        Returns:
            Whether it will be, or is being, reduced as it is now: not if it was marked before and its bucket has left.
        """
        if self._ready[entry]:
            return not self.is_launched(entry)
        self._ready[entry] = 1
        self.begin()
        self.mark_some_ready(self._bucket_of[entry], 1)
        return True

    def bucket_of(self, entry: int) -> int:
        """The index of the bucket that this gradient belongs to."""
        return self._bucket_of[entry]

    def begin(self) -> None:
        """Note that the first gradient of a pass is complete; `mark_ready` does so itself."""
        if not self.is_under_way:
            self.is_under_way, self.overlaps = True, self._overlap.now
        if recorder.on and not self._first_ready_at:
            self._first_ready_at = monotonic_ns()

    def mark_some_ready(self, bucket: int, count: int) -> None:
        """Note that so many more gradients of a bucket are complete, for callers that count them themselves."""
        self._missing[bucket] -= count
        if self._missing[bucket] == 0:
            if recorder.on:
                self._ready_at[bucket] = monotonic_ns()
            if bucket == self._next and self.overlaps and not self.holds:
                while self._next < self._early and self._missing[self._next] == 0:
                    self._launch(self._fill())

    def launch_rest(self) -> None:
        """Launch what is left, without waiting."""
        self._launch_rest(self._fill())

    def finish(self) -> None:
        """Launch what is left and wait until every bucket is reduced, or reduce synchronously what is left."""
        if self._first_ready_at:
            recorder.record("backward", "backward, from its first gradient", self._first_ready_at, monotonic_ns())
        self.begin()
        if self.overlaps:
            self.launch_rest()
        self._reduce_rest_synchronously(self._fill())
        self._wait(self._fill())

    def abandon(self, fill: Fill = lambda bucket: None) -> None:
        """End a pass that failed on this rank: the peers' reductions complete, with whatever the memory holds.

        Args:
            fill: returns memory for direct tensors, of the right sizes; its values do not matter.
        """
        self.begin()
        self._launch_rest(fill)
        self._wait(fill)

    def forget_errors(self) -> None:
        """Drop the rounding errors that would be added to the next pass."""
        self._codecs.clear()

    def _launch_rest(self, fill: Fill | None) -> None:
        """Other ranks may reduce the same pass in line, so what is one operation there is one here."""
        while self._next < len(self._buckets):
            self._launch(fill, 1 if self.overlaps else len(self._buckets))

    def _launch(self, fill: Fill | None, count: int = 1) -> None:
        description, reduce = self._reduction(fill, count)
        self._works.append(self._communicator.start(description, reduce, repeats=True))
        self._next += count

    def _reduce_rest_synchronously(self, fill: Fill | None) -> None:
        while self._next < len(self._buckets):
            try:
                self._reduce_synchronously(fill)
            except MembersLost:
                if self.kept is None:
                    raise
                self._restart()

    def _restart(self) -> None:
        """Go back to the first bucket: after a loss the pass is repeated as a whole, see `repetition`."""
        self._next, self._works = 0, []
        for codec in self._codecs.values():
            codec.undo()

    def _reduce_synchronously(self, fill: Fill | None) -> None:
        description, reduce = self._reduction(fill, len(self._buckets) - self._next)

        def count_and_reduce() -> None:
            self._next = len(self._buckets)  # an exception before this leaves them to `abandon`, which can still send
            reduce()

        started = time.perf_counter()
        self._communicator.run_synchronously(description, count_and_reduce)
        self.waited += time.perf_counter() - started

    def _reduction(self, fill: Fill | None, count: int) -> tuple[str, Callable[[], None]]:
        """Fill the next `count` buckets; returns the description of their reduction, and the function that does it."""
        assert fill is not None  # whose object calls this
        self.is_under_way = True
        first, launched = self._next, monotonic_ns() if recorder.on else 0
        filled = [self._memories_of(bucket, fill) for bucket in self._buckets[first : first + count]]
        nbytes = [sum(memory.nbytes for memory in memories) for memories in filled]
        ready = [self._ready_at.get(first + i, launched) for i in range(count)] if launched else []
        memories = [memory for of_bucket in filled for memory in of_bucket]
        codecs = self._codecs_of(first, filled)
        communicator, op = self._communicator, self._op
        self.reduced_bytes += sum(nbytes)

        def reduce() -> None:
            started = monotonic_ns() if launched else 0
            communicator.all_reduce_coalesced(memories, op, codecs)
            for i, since in enumerate(ready):
                recorder.record(
                    "bucket",
                    f"bucket {first + i}",
                    since,
                    monotonic_ns(),
                    launched=launched,
                    started=started,
                    nbytes=nbytes[i],
                )

        return self._descriptions[first] if count == 1 else self._description, reduce

    def _memories_of(self, bucket: Bucket, fill: Fill) -> Sequence[Any]:
        """The memory of a bucket, with this rank's gradients."""
        if self.kept is not None and (restored := self.kept.restored(bucket)) is not None:
            return restored
        memories: list[Any] = [self._buffer.memories[bucket.index], *(fill(bucket) or ())]
        if self.kept is not None:
            self.kept.keep(bucket, memories)
        return memories

    def _codecs_of(self, first: int, filled: Sequence[Sequence[Any]]) -> list[HalfCodec | None] | None:
        """The codecs for the memory of buckets from `first` on; None where all is sent between hosts as it is."""
        if self._compression is None:
            return None
        return [
            self._codec(self._compression, first + i, place, memory)
            for i, memories in enumerate(filled)
            for place, memory in enumerate(memories)
        ]

    def _codec(self, compression: Compression, bucket: int, place: int, memory: Memory) -> HalfCodec | None:
        """The codec for one memory; None sends it as it is. GPU memory has already been rounded."""
        if not isinstance(memory, HostMemory) or not compression.applies_to(memory.dtype):
            return None
        codec = self._codecs.setdefault((bucket, place), HalfCodec(compression, can_undo=self.kept is not None))
        codec.begin(memory.array)
        return codec

    def _wait(self, fill: Fill | None) -> None:
        """Wait for every bucket, and begin anew; if `fill` raised before, the pass is still under way."""
        try:
            started = time.perf_counter()
            if self.kept is None:
                for work in self._works:
                    work.wait()
            else:
                self._wait_repeatedly(fill)
            self.waited += time.perf_counter() - started
            self.passes += 1
            self._overlap.pass_ended(time.perf_counter())
            steps.end_step(self.reduced_bytes - self._bytes_before)
        except BaseException as error:
            # Nobody will wait for the buckets under way, whose memory the next pass writes to.
            under_way = [work for work in self._works if not work.done()]
            if under_way:
                self._communicator.interrupt(under_way[0].description, error)
            raise
        finally:
            self._start_pass()

    def _wait_repeatedly(self, fill: Fill | None) -> None:
        """Wait for every bucket, and launch all of them anew if members are lost meanwhile."""
        while self._works:  # none if they were reduced synchronously
            try:
                self._communicator.wait_for(self._works)
                return
            except MembersLost:
                self._restart()
                self._launch_rest(fill)


def _describe(buckets: Sequence[Bucket], plan: FusionPlan) -> str:
    """The description for reports: the buckets' numbers, the number of all buckets, and their contents."""
    names = [plan.entries[i].name for bucket in buckets for i in bucket.entries]
    numbers = f"bucket {buckets[0].index}" if len(buckets) == 1 else f"buckets 0 to {len(buckets) - 1}"
    if not names:
        return f"{numbers} of {len(plan.buckets)}"
    contents = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}, {len(names)} gradients"
    return f"{numbers} of {len(plan.buckets)} ({contents})"
