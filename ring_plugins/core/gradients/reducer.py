"""Reduces the buckets of a pass: while backward still computes other gradients, or synchronously at its end.

**Repetition.** A step is whole or not at all: each of its averages is taken over the same ranks. So when a rank dies in
the middle of a pass, the survivors reduce its first buckets again, too. By then these hold averages, and the bucket
under way holds anything. The gradients themselves are needed, and there are three ways to have them (`SavedInputs`):

- The plugin still has the tensors that it moved into the bucket, and moves them once more (`refill_by`).
- The average of a tensor is written elsewhere (`HostMemory.source`), so nothing overwrites the tensor.
- Anything else is copied before it is reduced: flags, control numbers, and gradients that accumulated where they are
  reduced. Only jobs that are to survive a loss pay for that. On a GPU the plugin copies and restores all (`refill_by`).

What error feedback has noted in the pass is undone, too (`Codec.undo`). A pass is over when its last barrier is passed.
All survivors pass it, or none does (core/control/mesh.py), so no rank steps with averages that another one lacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

import numpy as np

from ring_plugins.core.arrays.codec import Codec, Compression
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory, Memory
from ring_plugins.core.base.errors import MembersLost
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator, Work
from ring_plugins.core.gradients.fusion import Bucket, BucketMemory, FusionPlan
from ring_plugins.core.gradients.trials import ALWAYS, UNCHANGED, Choice
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.trace.steps import steps

#: Prepares a bucket and returns the memory of its direct tensors, or nothing if it has none.
Fill = Callable[[Bucket], Sequence[Memory] | None]


def is_filled(bucket: Bucket) -> None:
    """The `Fill` of buckets that hold their gradients already, and have no direct tensors."""


class SavedInputs:
    """What the buckets of a pass held before they were reduced."""

    def __init__(self) -> None:
        self._memories: dict[int, Sequence[Memory]] = {}  # by bucket, in this pass
        self._refills: dict[int, Callable[[], None]] = {}  # by bucket, in this pass
        self._copies: dict[tuple[int, int], Array] = {}  # by bucket and place in it; kept from pass to pass

    def refill_by(self, bucket: int, refill: Callable[[], None]) -> None:
        """Note before `keep` that the gradients in a bucket's own memory need no copy in this pass.

        Args:
            bucket: its index.
            refill: moves them there once more.
        """
        self._refills[bucket] = refill

    def keep(self, bucket: Bucket, memories: Sequence[Memory]) -> None:
        """Keep what a bucket holds.

        Args:
            bucket: which.
            memories: its own memory, and that of its direct tensors.
        """
        for place, memory in enumerate(memories):
            array = self._overwritten(bucket, place, memory)
            if array is None:
                continue
            copy = self._copies.get((bucket.index, place))
            if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
                copy = self._copies[bucket.index, place] = np.empty_like(array)
            np.copyto(copy, array)
        self._memories[bucket.index] = memories

    def restored(self, bucket: Bucket) -> Sequence[Memory] | None:
        """The memory of a bucket with what it held when it was kept; None if it was not kept in this pass."""
        memories = self._memories.get(bucket.index)
        for place, memory in enumerate(memories or ()):
            array = self._overwritten(bucket, place, memory)
            if array is not None:
                np.copyto(array, self._copies[bucket.index, place])
        if bucket.index in self._refills:
            self._refills[bucket.index]()
        return memories

    def _overwritten(self, bucket: Bucket, place: int, memory: Memory) -> Array | None:
        """The part of a memory that only a copy can restore."""
        if not isinstance(memory, HostMemory) or memory.source is not None:
            return None
        return memory.array[bucket.flags :] if place == 0 and bucket.index in self._refills else memory.array

    def clear(self) -> None:
        """Begin a new pass."""
        self._memories.clear()
        self._refills.clear()


class GradientReducer:
    """Launches the reduction of each bucket as soon as all its gradients, and all earlier buckets, are ready.

    Without overlap, `finish` reduces all buckets in the calling thread instead, by one operation (see `trials`).

    Buckets are launched in the order of the plan on every rank, whatever order gradients become ready in, so that ranks
    never have to ask each other what comes next. A pass begins with the first `mark_ready` and ends with `finish`,
    which launches the buckets that are left.

    Methods that may launch buckets take `fill`, which is called once a pass for every bucket, before its launch: it
    copies the bucket's gradients into its memory, and decides what is sent for one that never became ready.

    Where ranks may be lost, a pass is repeated as a whole after a loss (see the top of this file).

    Args:
        buffer: the buckets' memory.
        communicator: reduces it. Nobody else may use it, so that operations keep the order of the buckets.
        op: the reduction.
        compression: how host memory is compressed between hosts in every pass, the same on all ranks.
        holds_last: whether the last bucket always waits for `launch_rest`, which tells that backward has not raised.
        overlap: tells in every pass whether reductions overlap backward, the same on all ranks; they do by default.

    Attributes:
        bucket_of: by entry of the plan, the index of its bucket.
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
        op: Op = Op.AVERAGE,
        compression: Choice[Compression | None] = UNCHANGED,
        holds_last: bool = False,
        overlap: Choice[bool] = ALWAYS,
    ) -> None:
        self._buffer, self._communicator, self._op = buffer, communicator, op
        self._buckets = buffer.plan.buckets
        self._early = len(self._buckets) - holds_last
        self._choice_of_compression, self._compression = compression, compression.now
        self._codecs: dict[tuple[int, int], Codec] = {}  # by bucket and place in it
        self._gaps: dict[int, Array] = {}  # by bucket whose memory has a codec
        self._descriptions = [_describe([bucket], buffer.plan) for bucket in self._buckets]
        self._description = _describe(self._buckets, buffer.plan)  # of all buckets, reduced as one
        self._lengths = [len(bucket.entries) for bucket in self._buckets]
        self._nbytes = [-1] * len(self._buckets)  # with direct tensors; known once a bucket was filled
        self.bucket_of = [0] * len(buffer.plan.entries)
        for bucket in self._buckets:
            for entry in bucket.entries:
                self.bucket_of[entry] = bucket.index
        self.kept = SavedInputs() if communicator.recovers else None
        self._overlap = overlap
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
        self._ready = bytearray(len(self.bucket_of))
        self._missing = self._lengths[:]
        self._next = 0
        self._works: list[Work[None]] = []  # none for buckets that are reduced synchronously
        self._bytes_before = self.reduced_bytes
        self._ready_at: dict[int, int] = {}  # by bucket, while the recorder is on
        self._first_ready_at = 0

    def has_left(self, bucket: int) -> bool:
        """Whether this bucket is already being reduced."""
        return bucket < self._next

    def mark_ready(self, entry: int, fill: Fill) -> bool:
        """Note that a gradient is complete; marking it twice changes nothing.

        Returns:
            Whether it will be, or is being, reduced as it is now: not if it was marked before and its bucket has left.
        """
        bucket = self.bucket_of[entry]
        if self._ready[entry]:
            return not self.has_left(bucket)
        self._ready[entry] = 1
        self.begin()
        self.mark_some_ready(bucket, 1, fill)
        return True

    def begin(self) -> None:
        """Note that the first gradient of a pass is complete; `mark_ready` does so itself."""
        if not self.is_under_way:
            self.is_under_way, self.overlaps = True, self._overlap.now
            if self._compression != self._choice_of_compression.now:
                self._compression = self._choice_of_compression.now
                self._codecs.clear()
            steps.compression = self._compression.name if self._compression is not None else None
        if recorder.on and not self._first_ready_at:
            self._first_ready_at = monotonic_ns()

    def mark_some_ready(self, bucket: int, count: int, fill: Fill) -> None:
        """Note that so many more gradients of a bucket are complete, for callers that count them themselves."""
        self._missing[bucket] -= count
        if self._missing[bucket] == 0:
            if recorder.on:
                self._ready_at[bucket] = monotonic_ns()
            if bucket == self._next and self.overlaps and not self.holds:
                while self._next < self._early and self._missing[self._next] == 0:
                    self._launch(fill, 1)

    def launch_rest(self, fill: Fill) -> None:
        """Launch what is left, without waiting.

        Other ranks may reduce the same pass synchronously, so what is one operation there is one here.
        """
        while self._next < len(self._buckets):
            self._launch(fill, 1 if self.overlaps else len(self._buckets))

    def finish(self, fill: Fill) -> None:
        """Launch what is left and wait until every bucket is reduced, or reduce synchronously what is left."""
        if self._first_ready_at:
            recorder.record("backward", "backward, from its first gradient", self._first_ready_at, monotonic_ns())
        if not self.is_under_way:
            self.begin()
        if self.overlaps:
            self.launch_rest(fill)
        while self._next < len(self._buckets):
            try:
                reduce = partial(self._leave_and_reduce, self._reduction(fill, len(self._buckets) - self._next))
                started = time.perf_counter()
                self._communicator.run_synchronously(self._description, reduce)
                self.waited += time.perf_counter() - started
            except MembersLost:
                if self.kept is None:
                    raise
                self._restart()
        self._wait(fill)

    def abandon(self, fill: Fill) -> None:
        """End a pass that failed on this rank: the peers' reductions complete, with whatever the memory holds.

        Args:
            fill: returns memory for direct tensors, of the right sizes; its values do not matter.
        """
        self.begin()
        self.launch_rest(fill)
        self._wait(fill)

    def forget_errors(self) -> None:
        """Drop the rounding errors that would be added to the next pass."""
        self._codecs.clear()

    def _launch(self, fill: Fill, count: int) -> None:
        description = self._descriptions[self._next] if count == 1 else self._description
        reduce = self._reduction(fill, count)
        self._works.append(self._communicator.start(description, reduce, repeats=True))
        self._next += count

    def _restart(self) -> None:
        """Go back to the first bucket, to repeat the pass after a loss."""
        self._next, self._works = 0, []
        for codec in self._codecs.values():
            codec.undo()

    def _leave_and_reduce(self, reduce: Callable[[], None]) -> None:
        """Reduce the last buckets; an exception before this leaves them to `abandon`, which can still send them."""
        self._next = len(self._buckets)
        reduce()

    def _reduction(self, fill: Fill, count: int) -> Callable[[], None]:
        """Fill the next `count` buckets and return the function that reduces them.

        It holds their memory, but not this object, which it may outlive on a GPU.
        """
        self.is_under_way = True
        first, launched = self._next, monotonic_ns() if recorder.on else 0
        nbytes, memories = 0, list[Any]()
        codecs: list[Codec | None] | None = None if self._compression is None else []
        for bucket in self._buckets[first : first + count]:
            of_bucket: Sequence[Any] | None = None if self.kept is None else self.kept.restored(bucket)
            if of_bucket is None:
                of_bucket = [self._buffer.memories[bucket.index], *(fill(bucket) or ())]
                if self.kept is not None:
                    self.kept.keep(bucket, of_bucket)
            if self._nbytes[bucket.index] < 0:
                self._nbytes[bucket.index] = sum(memory.nbytes for memory in of_bucket)
            nbytes += self._nbytes[bucket.index]
            memories += of_bucket
            if codecs is not None:
                codecs += [self._codec(bucket, place, memory) for place, memory in enumerate(of_bucket)]
        self.reduced_bytes += nbytes
        reduce = partial(self._communicator.all_reduce_coalesced, memories, self._op, codecs)
        return partial(self._recorded, reduce, first, count, launched) if launched else reduce

    def _codec(self, bucket: Bucket, place: int, memory: Memory) -> Codec | None:
        """The codec for one memory; None sends it as it is. GPU memory has already been rounded."""
        assert self._compression is not None
        if not isinstance(memory, HostMemory) or not self._compression.applies_to(memory.dtype):
            return None
        codec = self._codecs.get((bucket.index, place))
        if codec is None:
            codec = self._codecs[bucket.index, place] = self._compression.codec(can_undo=self.kept is not None)
            if place == 0:
                self._gaps[bucket.index] = np.array(self._buffer.plan.gaps(bucket), np.intp)
        if place == 0:  # a codec may round a whole cache line alike: what one pass left there would spoil all others
            memory.array[self._gaps[bucket.index]] = 0
        codec.begin(memory.array, None if place else bucket.flags)  # flags and control numbers are not rounded
        return codec

    def _recorded(self, reduce: Callable[[], None], first: int, count: int, launched: int) -> None:
        """Reduce some buckets, and record that for a timeline."""
        started = monotonic_ns()
        reduce()
        ended = monotonic_ns()
        for bucket in range(first, first + count):
            since, nbytes = self._ready_at.get(bucket, launched), self._nbytes[bucket]
            times = {"launched": launched, "started": started}
            recorder.record("bucket", f"bucket {bucket}", since, ended, **times, nbytes=nbytes)

    def _wait(self, fill: Fill) -> None:
        """Wait for every bucket, and begin anew; if `fill` raised before, the pass is still under way."""
        try:
            if self._works:
                started = time.perf_counter()
                self._wait_for_works(fill)
                self.waited += time.perf_counter() - started
            self.passes += 1
            for choice in (self._choice_of_compression, self._overlap):
                if not choice.finished:
                    choice.pass_ended(time.perf_counter())
                    break
            now = time.monotonic()
            if recorder.on and steps.ended:
                recorder.record("step", f"step {steps.count}", int(steps.ended[-1][0] * 1e9), int(now * 1e9))
            nbytes = self.reduced_bytes - self._bytes_before
            steps.ended.append((now, steps.count, steps.waiting, steps.moving, steps.gpu_wait, nbytes))
            steps.count += 1
        except BaseException as error:
            # Nobody will wait for the buckets under way, whose memory the next pass writes to.
            under_way = [work for work in self._works if not work.done()]
            if under_way:
                self._communicator.interrupt(under_way[0].description, error)
            raise
        finally:
            self._start_pass()

    def _wait_for_works(self, fill: Fill) -> None:
        """Wait for every bucket, and launch all of them anew if members are lost meanwhile."""
        while True:
            try:
                self._communicator.wait_for(self._works)
                return
            except MembersLost:
                if self.kept is None:
                    raise
                self._restart()
                self.launch_rest(fill)


def _describe(buckets: Sequence[Bucket], plan: FusionPlan) -> str:
    """The description for reports: the buckets' numbers, the number of all buckets, and their contents."""
    names = [plan.entries[i].name for bucket in buckets for i in bucket.entries]
    numbers = f"bucket {buckets[0].index}" if len(buckets) == 1 else f"buckets 0 to {len(buckets) - 1}"
    if not names:
        return f"{numbers} of {len(plan.buckets)}"
    contents = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}, {len(names)} gradients"
    return f"{numbers} of {len(plan.buckets)} ({contents})"
