"""What a communicator has put on the stream of a GPU, and how that is ordered with the work around it.

When the GPU waits for too long: nobody may call for minutes while it does.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, PeerLeft, TimeoutExceeded
from ring_plugins.core.collectives.executor import Activity
from ring_plugins.core.control.wait import LongWait
from ring_plugins.core.gpu.cuda import Driver

#: Seconds in which the GPU may still finish what a rank that has ended in order had sent before.
_LAST_WORDS = 2.0


class Overdue:
    """Looks now and then at the oldest thing that a communicator's GPU has not finished.

    Args:
        name: of the communicator, for texts.
        rank: of this process in the job.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._timeout = config.TIMEOUT.get()
        self._waits_for_gone_since = 0.0

    def check(self, oldest: Queued | None, gone: Sequence[int]) -> None:
        """Raise where there is no point in waiting any longer.

        Args:
            oldest: unfinished work, None if there is none.
            gone: members (world ranks) whose processes have ended in order, so that nothing more will come from them.

        Raises:
            PeerLeft: what they sent before has had time to arrive.
            TimeoutExceeded: it takes longer than RING_TIMEOUT.
        """
        now = time.monotonic()
        if not gone or oldest is None:
            self._waits_for_gone_since = 0.0
        elif not self._waits_for_gone_since:
            self._waits_for_gone_since = now
        elif now - self._waits_for_gone_since > _LAST_WORDS:
            raise PeerLeft(
                f"rank {gone[0]} has ended its part of the job, and the GPU of rank {self._rank} waits for it in "
                f"{self._name}: {oldest.text}. Usually the ranks took different numbers of steps: give every "
                "rank the same number of batches.",
                gone[0],
            )
        if oldest is not None and now - oldest.since > self._timeout:
            raise TimeoutExceeded(
                f"{self._name}: the GPU has not finished {oldest.text} for {self._timeout:g} s. "
                "A rank did not call it, or computes for that long; set RING_TIMEOUT to wait longer."
            )


class Streams(Protocol):
    """The framework's streams, which only it knows."""

    def current(self) -> int:
        """Handle of the stream on which the calling thread's work goes now."""

    def using(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        """Let the calling thread's work go to that stream."""


class Queued:
    """Something on the communication stream.

    Attributes:
        description: for texts, such as a bucket.
        operation: the last operation in it.
        number: operations of the communicator up to it; equal on members in step.
        before: happens when the work is done that it comes after; 0 once that is known, and where there is none.
        event: happens when it is done; 0 once that is known.
        kept: what must stay alive until then.
        captured: it belongs to a CUDA graph; nobody can tell when that is replayed.
        since, came, ended: times of `time.monotonic` at which it was queued, at which somebody saw that the GPU had
            come to it, and at which somebody saw that it was done; 0 until then.
    """

    def __init__(
        self, description: str, operation: str, number: int, before: int, event: int, kept: list[Any], captured: bool
    ) -> None:
        self.description, self.operation, self.number = description, operation, number
        self.before, self.event, self.kept, self.captured = before, event, kept, captured
        self.since, self.came, self.ended = time.monotonic(), 0.0, 0.0

    @property
    def text(self) -> str:
        """What it is, in short."""
        return self.description or self.operation


class StreamQueue:
    """One communicator's part of the communication stream.

    Calls must be made with the device current, by one thread at a time.

    Args:
        name: of the communicator, for texts.
        stream: handle of the stream.
        streams: the framework's.
        driver: of this process.

    Attributes:
        stream: as above.
        unfinished: what is not known to be done, oldest first.
        captured: what belongs to CUDA graphs, whose replays use its memory.
        last: what was queued last.
    """

    def __init__(self, name: str, stream: int, streams: Streams, driver: Driver) -> None:
        self._name, self._streams, self._driver = name, streams, driver
        self.stream = stream
        self.unfinished: deque[Queued] = deque()
        self.captured: list[Queued] = []
        self.last: Queued | None = None
        self._kept: list[Any] = []
        self._before = 0
        self._has_run = False

    @property
    def oldest(self) -> Queued | None:
        """The first that is not known to be done."""
        return self.unfinished[0] if self.unfinished else None

    def keep(self, owners: Iterable[Any]) -> None:
        """Keep these alive until what is queued next is done."""
        self._kept += owners

    def follow_caller(self, description: str) -> int:
        """Let what is queued from now on come after the work that the caller's stream was given so far.

        Returns:
            The caller's stream.

        Raises:
            ArgumentError: a CUDA graph is being captured, and nothing has run before.
        """
        caller = self._streams.current()
        if not self._has_run and self._driver.is_capturing(caller):
            raise ArgumentError(
                f"{self._name}: {description} is the first thing to be sent, and a CUDA graph is being captured. Run a "
                "few ordinary steps before the capture, so that NCCL connects the GPUs outside of it."
            )
        if caller != self.stream:
            self._forget_before()
            self._before = self._driver.record(caller)
            self._driver.wait(self.stream, self._before)
        return caller

    def _forget_before(self) -> None:
        """Let go of an event that nothing was queued behind, because of an error."""
        before, self._before = self._before, 0
        if before:
            self._driver.destroy_event(before)

    def using(self) -> contextlib.AbstractContextManager[Any]:
        """Let what the framework does inside go to the communication stream."""
        return self._streams.using(self.stream)

    def lead_caller(self, caller: int) -> None:
        """Let what the caller's stream is given next come after all that is queued here."""
        event = self._driver.record(self.stream)
        self._driver.wait(caller, event)
        self._driver.destroy_event(event)

    def remember(self, description: str, operation: str, number: int, caller: int) -> Queued:
        """Note what was queued, to keep its memory and to notice that it takes too long.

        Args:
            description, operation, number: see `Queued`.
            caller: what `follow_caller` returned.
        """
        captured = self._driver.is_capturing(caller)
        if captured:
            self._forget_before()
        event = self._driver.record(self.stream)
        queued = Queued(description, operation, number, self._before, event, self._kept, captured)
        self._kept, self._before = [], 0
        if captured:
            self.captured.append(queued)
        else:
            self.forget_finished()
            self._has_run = True
            self.unfinished.append(queued)
            self.last = queued
        return queued

    def forget_finished(self) -> None:
        """Let go of the memory of what is done."""
        while self.unfinished and self.has_happened(self.unfinished[0]):
            self.unfinished.popleft()

    def has_happened(self, queued: Queued) -> bool:
        """Whether the GPU is done with it; asks, never waits."""
        if queued.event and not queued.captured and self._driver.happened(queued.event):
            self._driver.destroy_event(queued.event)
            queued.event, queued.kept, queued.ended = 0, [], time.monotonic()
            self._note_coming(queued)
        return not queued.event

    def look(self) -> None:
        """See how far the GPU has come; asks, never waits."""
        self.forget_finished()
        oldest = self.oldest
        if oldest is not None and not oldest.came and (not oldest.before or self._driver.happened(oldest.before)):
            self._note_coming(oldest)

    def _note_coming(self, queued: Queued) -> None:
        queued.came = queued.came or time.monotonic()
        before, queued.before = queued.before, 0
        if before:
            self._driver.destroy_event(before)

    def wait(self, members: Sequence[int]) -> LongWait | None:
        """What the GPU waits for, or moves bytes in, once it has come to it.

        Args:
            members: the other members (world ranks), all of which are named: NCCL does not tell who has not come.
        """
        oldest = self.oldest
        if oldest is None or not oldest.came:
            return None
        return LongWait(
            self._name,
            f"{self._name}: {oldest.operation} on the GPU",
            oldest.number,
            oldest.description,
            tuple(members),
            oldest.came,
            time.monotonic(),  # the script itself may go on
            on_gpu=True,
        )

    def activity(self) -> Activity | None:
        """What the GPU did last, or does now."""
        shown = self.oldest or self.last
        if shown is None:
            return None
        text = f"{shown.operation} on the GPU"
        if not shown.came:
            text += " (queued; the GPU computes what comes before it)"
        return Activity(self._name, text, shown.description, shown.since, shown.ended, shown.number)

    def join(self, queued: Queued) -> None:
        """Let what the caller's stream is given next come after `queued`."""
        caller = self._streams.current()
        if queued.event and caller != self.stream:
            self._driver.wait(caller, queued.event)

    def clear(self) -> None:
        """Forget everything."""
        self.unfinished.clear()
        self.captured.clear()
