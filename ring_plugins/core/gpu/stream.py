"""What a communicator has queued on a GPU's stream: ordered with the framework's work, kept alive, looked after.

The framework computes on streams of its own, and NCCL's kernels run on the communication stream. Two events order them
without stopping the host: one recorded on the caller's stream, for which the communication stream waits before an
operation, and one recorded behind the operation, for which the caller's stream waits before it reads the result. c10d
does the same.

Memory must not be reused while NCCL's kernels work on it. c10d once told torch's allocator about the second stream
(`record_stream`); we hold references instead, as c10d does now, which works for every framework. They are dropped when
the caller's stream waits for the second event: whatever the allocator gives that memory to next comes later on that
stream. Waiting until the host has seen the event would keep large gradients alive through the next forward, because the
host runs ahead of the GPU. If nobody waits, the references go when the event has passed.

Nobody may call for minutes while a GPU waits for a rank that does not come, so another thread polls these events: that
tells what the GPU waits for (`long_wait`) and when waiting is useless (`check_progress`).

**Calls that keep the interpreter's lock** (`library` says why). Recording an event, or letting a stream wait for one,
blocks while the stream is full, after some thousand kernels. The GPU makes room again, unless what is first there waits
for a rank that is dead. If the lock were kept then, the thread that ends that wait could not run, and the process would
stand still for good. So the lock is kept only while no stream of a framework waits for an operation of ours that is not
done, and few of ours are queued: then a full stream is one on which the GPU computes. Otherwise the host is ahead of
the GPU, and has the time. Whether an operation is done is asked with the lock kept, too, as torch does; where others'
communicators are stuck, threads that know nothing of Python end that. The other thread's looks release the lock.

In one step of 50, and in all steps while a timeline is recorded, more events note the GPU's own time: around each
operation, and where the caller's stream begins to wait for it. They are read when the operation is known to be done, so
nothing waits for them. From them the stall report knows how long the operation usually takes, and the breakdown of
steps how long the GPU waited for communication. That is 17 calls of the driver for an operation that is timed: about
two a step, or two microseconds, for a model of six buckets. In a timeline the length is exact; it is shown as ending
when the host saw that, which is at the next operation, or at the next look of the other thread.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, DeviceError, PeerLeft, TimeoutExceeded
from ring_plugins.core.collectives.api import Activity
from ring_plugins.core.control.wait import LongWait
from ring_plugins.core.gpu.cuda import Driver
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.trace.steps import steps

#: Seconds in which the GPU may still complete operations of a rank that has left: its data may be on the way.
_IN_FLIGHT = 2.0
#: Every so many steps one is timed, at first this one, when NCCL has connected and autotuned.
_TIMED_EVERY, _FIRST_TIMED = 50, 10
#: Operations that are timed in such a step, at most: evaluation may have thousands between two steps.
_TIMED_OPERATIONS = 128
#: Operations for which the communication stream has room, whatever they are made of.
_ROOM = 64
#: By communicator of this process the last operation for which a stream of the framework waits.
_awaited: dict[int, weakref.ref[QueuedOperation]] = {}


class Streams(Protocol):
    """A framework's streams on one GPU."""

    def current(self) -> int:
        """Handle of the stream to which the calling thread's work goes now."""

    def using(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        """Send the calling thread's work to this stream inside the context."""

    def scale(self, memory: DeviceMemory, factor: float) -> None:
        """Multiply memory in place on the current stream; in float32 at least, then rounded to the memory's type."""


@dataclass(eq=False)
class QueuedOperation:
    """One operation, or one group of them, on the communication stream.

    Attributes:
        description: of the work it belongs to, such as a bucket; "" for a call of the script's own.
        operation: the last collective in it.
        number: operations of the communicator up to this one; equal on members in step.
        caller: handle of the stream that it followed.
        start_event: passes when the work before it is done; 0 once that is known, and where there is none.
        end_event: passes when it is done; 0 once that is known.
        owners: of the memory it works on, to keep that alive; empty once the caller's stream waits for it.
        is_captured: whether it belongs to a CUDA graph. Nobody can tell when that is replayed.
        queued_at: time of `time.monotonic`.
        reached_at: when somebody first saw that the GPU had come to it, 0 before.
        done_at: when somebody first saw that it was done, 0 before.
        times: events that note when the GPU began and ended it, none unless it is timed.
        join_time: an event that notes when the caller's stream began to wait for it, 0 unless it is timed.
        step: number of the step that it is part of.
    """

    description: str
    operation: str
    number: int
    caller: int
    start_event: int
    end_event: int
    owners: list[Any]
    is_captured: bool
    times: tuple[int, ...] = ()
    join_time: int = 0
    queued_at: float = field(default_factory=time.monotonic)
    reached_at: float = 0.0
    done_at: float = 0.0
    step: int = field(default_factory=lambda: steps.count)

    @property
    def text(self) -> str:
        """Its name in error texts."""
        return self.description or self.operation


class StreamQueue:
    """One communicator's operations on the communication stream.

    Used by one thread at a time, with the device current.

    Args:
        name: of the communicator, for error texts.
        rank: world rank of this process.
        stream: handle of the stream.
        streams: the framework's streams.
        driver: of this process.

    Attributes:
        stream: as above.
        unfinished: operations not known to be done, oldest first.
        captured: operations that belong to CUDA graphs, whose replays use their memory.
        finished: number of the last operation known to be done, as all before it are.
        has_completed: whether the GPU has completed an operation.
        seconds: how long the GPU took for operations, by their text, when they were last timed.
    """

    def __init__(self, name: str, rank: int, stream: int, streams: Streams, driver: Driver) -> None:
        self._name, self._rank, self._streams, self._driver = name, rank, streams, driver
        self._launching = driver  # by which calls the script's thread queues
        self.stream = stream
        self.unfinished: deque[QueuedOperation] = deque()
        self.captured: list[QueuedOperation] = []
        self._last: QueuedOperation | None = None
        #: Events to record again; creating one takes the driver longer than recording it.
        self._free_events: list[int] = []
        self._owners: list[Any] = []
        self._start_event = self._begin_time = 0
        self._has_run = self.has_completed = False
        self.finished = 0
        self.seconds: dict[str, float] = {}
        self._timed_step, self._timed_operations = -1, 0
        self._timeout = config.TIMEOUT.get()
        self._departed_since = 0.0

    @property
    def oldest(self) -> QueuedOperation | None:
        """The first operation not known to be done."""
        try:
            return self.unfinished[0]
        except IndexError:  # checking first would race with the script's thread, which removes what is done
            return None

    # Order ----------------------------------------------------------------------------------------

    def keep_alive(self, owners: Iterable[Any]) -> None:
        """Hold these until the operation pushed next is done."""
        self._owners += owners

    def follow_caller(self, description: str) -> int:
        """Let what is queued from now on start after the work that the caller's stream has so far.

        Returns:
            Handle of the caller's stream.

        Raises:
            ArgumentError: a CUDA graph is being captured, and no operation has run before.
        """
        caller = self._streams.current()
        known = _awaited.get(id(self))
        mine = known() if known is not None else None
        if mine is not None and self._is_over(mine, self._driver.keeping):
            del _awaited[id(self)]
        self._choose_calls()
        if not self._has_run and self._driver.is_capturing(caller):
            raise ArgumentError(
                f"{self._name}: {description} is the first operation, and a CUDA graph is being captured. Run a few "
                "ordinary steps before the capture, so that NCCL connects the GPUs outside of it."
            )
        if caller != self.stream:
            self._drop_start_event()
            self._start_event = self._record_event(caller)
            self._launching.wait_event(self.stream, self._start_event)
            if self._is_timed() and not self._driver.is_capturing(caller):
                self._begin_time = self._driver.record_time(self.stream)
        elif not self._start_event:  # a message: this stream was made to wait for the caller's before
            self._start_event = self._record_event(self.stream)
        return caller

    def _choose_calls(self) -> None:
        """Keep the interpreter's lock in the next calls if none of them can block for good; see the top of the file."""
        awaited = [one for known in list(_awaited.values()) if (one := known()) is not None]
        is_clear = len(self.unfinished) < _ROOM and not any(one.end_event for one in awaited)
        self._launching = self._driver.keeping if is_clear else self._driver

    def _is_timed(self) -> bool:
        """Whether to time the operation that comes next."""
        if recorder.on:
            return True
        if steps.count % _TIMED_EVERY != _FIRST_TIMED:
            return False
        if steps.count != self._timed_step:
            self._timed_step, self._timed_operations = steps.count, 0
        self._timed_operations += 1
        return self._timed_operations <= _TIMED_OPERATIONS

    def _record_event(self, stream: int) -> int:
        return self._launching.record_event(stream, self._free_events.pop() if self._free_events else 0)

    def _drop_start_event(self) -> None:
        """Release an event behind which nothing was pushed, because of an error or of a capture.

        An event that was captured belongs to a graph, so it is not used again.
        """
        event, self._start_event = self._start_event, 0
        begin, self._begin_time = self._begin_time, 0
        for one in filter(None, (event, begin)):
            self._driver.destroy_event(one)

    def push(self, description: str, operation: str, number: int, caller: int) -> QueuedOperation:
        """Note what was just queued, to keep its memory alive and to see when it is done.

        Args:
            description, operation, number: see `QueuedOperation`.
            caller: the result of `follow_caller`.
        """
        is_captured = self._launching.is_capturing(caller)
        if is_captured:
            self._drop_start_event()
        times = (self._begin_time, self._driver.record_time(self.stream)) if self._begin_time else ()
        end_event = self._record_event(self.stream)
        queued = QueuedOperation(
            description, operation, number, caller, self._start_event, end_event, self._owners, is_captured, times
        )
        self._owners, self._start_event, self._begin_time = [], 0, 0
        if is_captured:
            self.captured.append(queued)
        else:
            self.drop_finished(self._launching)
            self._has_run = True
            self.unfinished.append(queued)
            self._last = queued
        return queued

    def make_follow(self, stream: int, queued: QueuedOperation) -> None:
        """Let the next work on a stream start after `queued`."""
        if queued.end_event and stream != self.stream:
            self._choose_calls()
            if queued.times and not queued.join_time and stream == queued.caller:
                queued.join_time = 0 if self._driver.is_capturing(stream) else self._driver.record_time(stream)
            self._launching.wait_event(stream, queued.end_event)
            if not queued.is_captured:
                _awaited[id(self)] = weakref.ref(queued)
                if stream == queued.caller:
                    self._release_owners(queued)

    def _release_owners(self, last: QueuedOperation) -> None:
        """Drop what the operations up to this one refer to: the stream that they followed waits for it."""
        for queued in self.unfinished:
            if queued.caller == last.caller:
                queued.owners = []
            if queued is last:
                break

    # Progress -------------------------------------------------------------------------------------

    def is_done(self, queued: QueuedOperation) -> bool:
        """Whether the GPU has completed it; never waits."""
        return self._is_over(queued, self._driver)

    def _is_over(self, queued: QueuedOperation, driver: Driver) -> bool:
        if queued.end_event and not queued.is_captured and driver.query_event(queued.end_event):
            self._free_events.append(queued.end_event)
            self._mark_reached(queued)
            self.has_completed = True
            queued.end_event, queued.owners, queued.done_at = 0, [], time.monotonic()
            if queued.times:
                self._record_times(queued)
        return not queued.end_event

    def _record_times(self, queued: QueuedOperation) -> None:
        """Note how long an operation that is done took; a failure here must not end the training."""
        with contextlib.suppress(DeviceError):
            begin_time, end_time = queued.times
            seconds = self._driver.seconds_between(begin_time, end_time)
            if queued.text not in self.seconds and len(self.seconds) >= _TIMED_OPERATIONS:
                self.seconds.clear()
            self.seconds[queued.text] = seconds
            end = int(queued.done_at * 1e9)
            recorder.record("gpu", queued.text, end - int(seconds * 1e9), end, operation=queued.operation)
            waited = 0.0
            if queued.join_time:  # negative if it was done before anybody waited: backward hid it
                with contextlib.suppress(DeviceError):  # the GPU has not come to the join yet: the same
                    waited = max(0.0, self._driver.seconds_between(queued.join_time, end_time))
            steps.add_gpu_wait(queued.step, waited)
        self._drop_times(queued)

    def _drop_times(self, queued: QueuedOperation) -> None:
        events = filter(None, (*queued.times, queued.join_time))
        queued.times, queued.join_time = (), 0
        for event in events:
            self._driver.destroy_event(event)

    def drop_finished(self, driver: Driver | None = None) -> None:
        """Release the memory of operations that are done; asks by the calls of `driver`, if that is given."""
        while self.unfinished and self._is_over(self.unfinished[0], driver or self._driver):
            self.finished = self.unfinished.popleft().number

    def poll(self) -> None:
        """Look how far the GPU has come; never waits."""
        self.drop_finished()
        oldest = self.oldest
        if oldest is None or oldest.reached_at:
            return
        if not oldest.start_event or self._driver.query_event(oldest.start_event):
            self._mark_reached(oldest)

    def _mark_reached(self, queued: QueuedOperation) -> None:
        queued.reached_at = queued.reached_at or time.monotonic()
        event, queued.start_event = queued.start_event, 0
        if event:
            self._free_events.append(event)

    def check_progress(self, departed: Sequence[int]) -> None:
        """Raise if it is useless to wait any longer for the oldest operation.

        Args:
            departed: members (world ranks) whose processes have ended normally.

        Raises:
            PeerLeft: the GPU waits for one of them, and has done so for long enough for data on the way to arrive.
            TimeoutExceeded: the operation takes longer than RING_TIMEOUT.
        """
        now, oldest = time.monotonic(), self.oldest
        if oldest is None or not departed or not oldest.reached_at:  # a GPU that still computes waits for nobody
            self._departed_since = 0.0
        elif not self._departed_since:
            self._departed_since = now
        elif now - self._departed_since > _IN_FLIGHT:
            raise PeerLeft(
                f"rank {departed[0]} has left the job, but the GPU of rank {self._rank} waits for it in "
                f"{self._name}: {oldest.text}. Usually the ranks took different numbers of steps: give every rank the "
                "same number of batches.",
                departed[0],
            )
        if oldest is not None and now - oldest.queued_at > self._timeout:
            raise TimeoutExceeded(
                f"{self._name}: the GPU has not finished {oldest.text} for {self._timeout:g} s. A rank did not call "
                "it, or computes for that long; set RING_TIMEOUT to wait longer."
            )

    def long_wait(self, peers: Sequence[int]) -> LongWait | None:
        """The operation in which the GPU waits or moves bytes, None if it has not come to any.

        Args:
            peers: world ranks of the other members; all count as missing, since NCCL does not say who has not come.
        """
        oldest = self.oldest
        if oldest is None or not oldest.reached_at:
            return None
        return LongWait(
            self._name,
            f"{self._name}: {oldest.operation} on the GPU",
            oldest.number,
            oldest.description,
            tuple(peers),
            oldest.reached_at,
            time.monotonic(),  # the script itself may go on
            on_gpu=True,
        )

    def activity(self) -> Activity | None:
        """The operation that the GPU is working on, or worked on last."""
        shown = self.oldest or self._last
        if shown is None:
            return None
        text = f"{shown.operation} on the GPU"
        if not shown.reached_at:
            text += " (queued; the GPU computes what comes before it)"
        if shown.text in self.seconds:
            text += f", which took {self.seconds[shown.text] * 1e3:.3g} ms when it was last timed"
        return Activity(self._name, text, shown.description, shown.queued_at, shown.done_at, shown.number)

    def clear(self) -> None:
        """Forget all operations, and release the events of those that no CUDA graph captured."""
        _awaited.pop(id(self), None)
        self._drop_start_event()
        for queued in self.unfinished:
            self._free_events += filter(None, (queued.start_event, queued.end_event))
            queued.start_event = queued.end_event = 0
            self._drop_times(queued)
        while self._free_events:
            self._driver.destroy_event(self._free_events.pop())
        self.unfinished.clear()
        self.captured.clear()
