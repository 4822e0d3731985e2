"""Spans of time for a timeline, recorded only while one is being written.

Code that does something worth seeing in a timeline checks `recorder.on` before it reads the clock:

    began = monotonic_ns() if recorder.on else 0
    ...
    if began:
        recorder.record("operation", "all_reduce", began, monotonic_ns(), nbytes=4096)
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, NamedTuple

#: Spans kept until they are taken, which happens every second or so. Beyond this many the oldest are lost.
_LIMIT = 50_000


class Span(NamedTuple):
    """A span of time.

    Attributes:
        kind: "step", "backward", "wait" and "call" of the script, "operation" and "bucket" of the communication thread,
            "gpu" of the GPU's communication stream.
        name: shown in the timeline.
        begin, end: times of `time.monotonic_ns`.
        arguments: details, as JSON can hold them.
    """

    kind: str
    name: str
    begin: int
    end: int
    arguments: dict[str, Any]


class Recorder:
    """Collects the spans of all threads while it is on.

    Attributes:
        on: whether it collects.
        lost: number of spans dropped because they were not taken in time.
    """

    def __init__(self) -> None:
        self.on = False
        self.lost = 0
        self._spans: deque[Span] = deque()

    def record(self, kind: str, name: str, begin: int, end: int, **arguments: Any) -> None:
        """Keep a `Span`, if the recorder is on."""
        if not self.on:
            return
        if len(self._spans) >= _LIMIT:
            self._spans.popleft()
            self.lost += 1
        self._spans.append(Span(kind, name, begin, end, arguments))

    def take(self) -> list[Span]:
        """The spans since the last call."""
        taken: list[Span] = []
        with contextlib.suppress(IndexError):  # another thread may take them at the same time
            while len(taken) < _LIMIT:
                taken.append(self._spans.popleft())
        return taken


#: The recorder of this process.
recorder = Recorder()
