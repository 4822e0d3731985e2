"""What happened when in this process, kept only while somebody wants it.

Whoever does something worth seeing in a timeline asks `recorder.on` first and only then reads the clock:

    began = monotonic_ns() if recorder.on else 0
    ...
    if began:
        recorder.record("operation", "all_reduce", began, monotonic_ns(), nbytes=4096)
"""

from __future__ import annotations

import contextlib
from collections import deque
from time import monotonic_ns
from typing import Any, NamedTuple

#: Spans that wait to be taken. They are taken every second or so; beyond this many the oldest are lost.
_LIMIT = 50_000


class Span(NamedTuple):
    """Something that took a time.

    Attributes:
        kind: "step", "backward", "wait" and "call" of the script, "operation" and "bucket" of the communication thread.
        name: what it was.
        begin, end: as `time.monotonic_ns` says them.
        arguments: what JSON can hold.
    """

    kind: str
    name: str
    begin: int
    end: int
    arguments: dict[str, Any]


class Recorder:
    """Collects spans of all threads while it is on.

    Attributes:
        on: whether anyone collects; where it is False, calling `record` is not worth the time.
        lost: spans that were dropped because nobody took them in time.
    """

    def __init__(self) -> None:
        self.on = False
        self.lost = 0
        self._spans: deque[Span] = deque()

    def record(self, kind: str, name: str, begin: int, end: int, **arguments: Any) -> None:
        """Keep a span; nothing where the recorder is off. See `Span`."""
        if not self.on:
            return
        if len(self._spans) >= _LIMIT:
            self._spans.popleft()
            self.lost += 1
        self._spans.append(Span(kind, name, begin, end, arguments))

    def take(self) -> list[Span]:
        """The spans since the last call."""
        taken: list[Span] = []
        with contextlib.suppress(IndexError):  # two threads may take at once
            while len(taken) < _LIMIT:
                taken.append(self._spans.popleft())
        return taken


#: The one of this process.
recorder = Recorder()
record = recorder.record

__all__ = ["Recorder", "Span", "monotonic_ns", "record", "recorder"]
