"""What a communicator has put on the stream of a GPU, and how that is ordered with the work around it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from ring_plugins.core.errors import ArgumentError
from ring_plugins.core.nccl.driver import Driver


class Streams(Protocol):
    """The framework's streams, which only it knows."""

    def current(self) -> int:
        """Handle of the stream on which the calling thread's work goes now."""

    def using(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        """Let the calling thread's work go to that stream."""


class Queued:
    """Something on the communication stream.

    Attributes:
        description: for texts.
        event: happens when it is done; 0 once that is known.
        since: when it was queued, a time of `time.monotonic`.
        kept: what must stay alive until then.
        captured: it belongs to a CUDA graph; nobody can tell when that is replayed.
    """

    def __init__(self, description: str, event: int, kept: list[Any], captured: bool) -> None:
        self.description, self.event, self.kept, self.captured = description, event, kept, captured
        self.since = time.monotonic()


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
    """

    def __init__(self, name: str, stream: int, streams: Streams, driver: Driver) -> None:
        self._name, self._streams, self._driver = name, streams, driver
        self.stream = stream
        self.unfinished: deque[Queued] = deque()
        self.captured: list[Queued] = []
        self._kept: list[Any] = []
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
        self._let_follow(self.stream, caller)
        return caller

    def using(self) -> contextlib.AbstractContextManager[Any]:
        """Let what the framework does inside go to the communication stream."""
        return self._streams.using(self.stream)

    def lead_caller(self, caller: int) -> None:
        """Let what the caller's stream is given next come after all that is queued here."""
        self._let_follow(caller, self.stream)

    def _let_follow(self, later: int, earlier: int) -> None:
        if later != earlier:
            event = self._driver.record(earlier)
            self._driver.wait(later, event)
            self._driver.destroy_event(event)

    def remember(self, description: str, caller: int) -> Queued:
        """Note what was queued, to keep its memory and to notice that it takes too long."""
        captured = self._driver.is_capturing(caller)
        queued = Queued(description, self._driver.record(self.stream), self._kept, captured)
        self._kept = []
        if captured:
            self.captured.append(queued)
        else:
            self.forget_finished()
            self._has_run = True
            self.unfinished.append(queued)
        return queued

    def forget_finished(self) -> None:
        """Let go of the memory of what is done."""
        while self.unfinished and self.has_happened(self.unfinished[0]):
            self.unfinished.popleft()

    def has_happened(self, queued: Queued) -> bool:
        """Whether the GPU is done with it; asks, never waits."""
        if queued.event and not queued.captured and self._driver.happened(queued.event):
            self._driver.destroy_event(queued.event)
            queued.event, queued.kept = 0, []
        return not queued.event

    def join(self, queued: Queued) -> None:
        """Let what the caller's stream is given next come after `queued`."""
        caller = self._streams.current()
        if queued.event and caller != self.stream:
            self._driver.wait(caller, queued.event)

    def clear(self) -> None:
        """Forget everything."""
        self.unfinished.clear()
        self.captured.clear()
