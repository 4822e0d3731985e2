"""Launches the reduction of each bucket while backward still computes other gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any

from ring_plugins.core.arrays.codec import Compression, HalfCodec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory, Memory
from ring_plugins.core.collectives.api import Communicator, Work
from ring_plugins.core.gradients.fusion import Bucket, BucketMemory, FusionPlan
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.trace.steps import steps

#: Prepares a bucket and returns the memory of its direct tensors.
Fill = Callable[[Bucket], Sequence[Memory] | None]


class GradientReducer:
    """Launches the reduction of each bucket as soon as all its gradients, and all earlier buckets, are ready.

    Buckets are launched in the order of the plan on every rank, whatever order gradients become ready in, so that ranks
    never have to ask each other what comes next. A pass begins with the first `mark_ready` and ends with `finish`,
    which launches the buckets that are left. For a gradient that never became ready, `fill` decides what is sent.

    Args:
        buffer: the buckets' memory.
        communicator: reduces it. Nobody else may use it, so that operations keep the order of the buckets.
        fill: called once a pass for every bucket, before its launch, to copy its gradients into the memory; returns the
            memory of the bucket's direct tensors, or nothing if it has none.
        op: the reduction.
        compression: how host memory is compressed between hosts; None sends it as it is.
    """

    def __init__(
        self,
        buffer: BucketMemory,
        communicator: Communicator[Any],
        fill: Fill,
        op: Op = Op.AVERAGE,
        compression: Compression | None = None,
    ) -> None:
        self._buffer, self._communicator, self._fill, self._op = buffer, communicator, fill, op
        self._buckets = buffer.plan.buckets
        self._compression = compression
        self._codecs: dict[tuple[int, int], HalfCodec] = {}
        self._descriptions = [_describe(bucket, buffer.plan) for bucket in self._buckets]
        self._bucket_of = [0] * len(buffer.plan.entries)
        for bucket in self._buckets:
            for entry in bucket.entries:
                self._bucket_of[entry] = bucket.index
        #: Seconds that `finish` waited, bytes reduced, passes finished.
        self.waited = 0.0
        self.reduced_bytes = 0
        self.passes = 0
        self._start_pass()

    def _start_pass(self) -> None:
        self._ready = bytearray(len(self._bucket_of))
        self._missing = [len(bucket.entries) for bucket in self._buckets]
        self._next = 0
        self._works: list[Work[None]] = []
        self._bytes_before = self.reduced_bytes
        self._ready_at: dict[int, int] = {}  # by bucket, while the recorder is on
        self._first_ready_at = 0

    @property
    def is_under_way(self) -> bool:
        """Whether a pass has begun and not been finished."""
        return self._next > 0 or any(self._ready)

    def is_launched(self, entry: int) -> bool:
        """Whether the bucket of this gradient is already being reduced."""
        return self._bucket_of[entry] < self._next

    def is_ready(self, entry: int) -> bool:
        """Whether this gradient has been marked in this pass."""
        return bool(self._ready[entry])

    def mark_ready(self, entry: int) -> None:
        """Note that a gradient is complete; marking it twice changes nothing."""
        if self._ready[entry]:
            return
        self._ready[entry] = 1
        if recorder.on and not self._first_ready_at:
            self._first_ready_at = monotonic_ns()
        bucket = self._bucket_of[entry]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            if recorder.on:
                self._ready_at[bucket] = monotonic_ns()
            if bucket != self._next:
                return
            while self._next < len(self._buckets) and self._missing[self._next] == 0:
                self._launch(self._fill)

    def finish(self) -> None:
        """Launch what is left and wait until every bucket is reduced."""
        if self._first_ready_at:
            recorder.record("backward", "backward, from its first gradient", self._first_ready_at, monotonic_ns())
        self._complete(self._fill)

    def abandon(self, fill: Fill = lambda bucket: None) -> None:
        """End a pass that failed on this rank: the peers' reductions complete, with whatever the memory holds.

        Args:
            fill: returns memory for direct tensors, of the right sizes; its values do not matter.
        """
        self._complete(fill)

    def _launch(self, fill: Fill) -> None:
        bucket = self._buckets[self._next]
        memories = [self._buffer.memories[bucket.index], *(fill(bucket) or ())]
        communicator, op = self._communicator, self._op

        nbytes = sum(memory.nbytes for memory in memories)
        launched = monotonic_ns() if recorder.on else 0
        ready = self._ready_at.get(bucket.index, launched)

        def reduce() -> None:
            started = monotonic_ns() if launched else 0
            with communicator.group():
                for place, memory in enumerate(memories):
                    communicator.all_reduce(memory, op, self._codec(bucket.index, place, memory))
            if launched:
                recorder.record(
                    "bucket",
                    f"bucket {bucket.index}",
                    ready,
                    monotonic_ns(),
                    launched=launched,
                    started=started,
                    nbytes=nbytes,
                )

        self._works.append(communicator.start(self._descriptions[bucket.index], reduce))
        self._next += 1
        self.reduced_bytes += nbytes

    def _codec(self, bucket: int, place: int, memory: Memory) -> HalfCodec | None:
        """The codec for memory sent between hosts; None sends it as it is. GPU memory has already been rounded."""
        compression = self._compression
        if compression is None or not isinstance(memory, HostMemory) or not compression.applies_to(memory.dtype):
            return None
        codec = self._codecs.setdefault((bucket, place), HalfCodec(compression))
        codec.begin(memory.array)
        return codec

    def _complete(self, fill: Fill) -> None:
        try:
            while self._next < len(self._buckets):
                self._launch(fill)
            started = time.perf_counter()
            for work in self._works:
                work.wait()
            self.waited += time.perf_counter() - started
            self.passes += 1
            steps.end_step(self.reduced_bytes - self._bytes_before)
        finally:
            self._start_pass()


def _describe(bucket: Bucket, plan: FusionPlan) -> str:
    """The description for reports: the bucket's number, the number of buckets, and its contents."""
    names = [plan.entries[i].name for i in bucket.entries]
    contents = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}, {len(names)} gradients"
    return f"bucket {bucket.index} of {len(plan.buckets)} ({contents})"
