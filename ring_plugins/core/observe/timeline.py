"""A timeline of all ranks in one file, written while the job runs.

Spans as the events that Perfetto (ui.perfetto.dev) and chrome://tracing draw: a process a rank, a row a thread.

How far this host's clock is from rank 0's.

As in Cristian, "Probabilistic clock synchronization" (1989): of many questions what time it is, the answer that came
back fastest was read closest to the middle between question and answer, at most half that time off.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic_ns
from typing import IO, Any

from ring_plugins.core.control.channel import EVERYONE, Body, Channel
from ring_plugins.core.control.failure_detector import Peer
from ring_plugins.core.trace.recorder import Span, recorder

#: kind, name, begin and end in nanoseconds on rank 0's clock, arguments: a `Span` on its way.
Row = tuple[str, str, int, int, dict[str, Any]]
Event = dict[str, Any]

_SCRIPT, _COMMUNICATION = 0, 1
_ROWS = {"step": _SCRIPT, "backward": _SCRIPT, "wait": _SCRIPT, "call": _SCRIPT, "operation": _COMMUNICATION}

_identities = itertools.count(1)


def header(rank: int, host: str) -> list[Event]:
    """What names a rank's rows."""
    names = [("process_name", 0, f"rank {rank} on {host}")]
    names += [("thread_name", _SCRIPT, "script"), ("thread_name", _COMMUNICATION, "communication")]
    events: list[Event] = [
        {"ph": "M", "pid": rank, "tid": row, "name": what, "args": {"name": name}} for what, row, name in names
    ]
    return [*events, {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}]


def label(rank: int, uncertainty: int, lost: int) -> Event:
    """What a viewer shows beside a rank's name: how well its clock is known, in nanoseconds, and spans lost."""
    text = "rank 0's clock" if uncertainty == 0 else f"clock within {uncertainty / 1e3:.0f} µs of rank 0's"
    text += f", {lost} spans lost" if lost else ""
    return {"ph": "M", "pid": rank, "name": "process_labels", "args": {"labels": text, "uncertainty": uncertainty}}


def events(rank: int, row: Row, origin: int) -> Iterator[Event]:
    """The events of a span.

    Args:
        rank: whose it is.
        row: the span.
        origin: nanoseconds that count as 0.
    """
    kind, name, begin, end, arguments = row
    if kind == "bucket":
        yield from _bucket(rank, row, origin)
        return
    yield {
        "ph": "X",
        "pid": rank,
        "tid": _ROWS.get(kind, _SCRIPT),
        "cat": kind,
        "name": f"wait for {name}" if kind == "wait" else name,
        "ts": (begin - origin) / 1e3,
        "dur": max(0, end - begin) / 1e3,
        "args": arguments,
    }


def _bucket(rank: int, row: Row, origin: int) -> Iterator[Event]:
    """A bucket overlaps with others, so it has a row of its own: ready, launched, started, reduced."""
    _, name, ready, reduced, arguments = row
    launched, started = int(arguments["launched"]), int(arguments["started"])
    both = {"pid": rank, "tid": _COMMUNICATION, "cat": "bucket", "id": next(_identities)}
    parts = [
        (name, ready, reduced, {"nbytes": arguments["nbytes"]}),
        ("until launched", ready, launched, {}),
        ("until its turn", launched, started, {}),
        ("reducing", started, reduced, {}),
    ]
    for part, begin, end, more in parts:
        yield {**both, "ph": "b", "name": part, "ts": (begin - origin) / 1e3, "args": more}
        yield {**both, "ph": "e", "name": part, "ts": (max(begin, end) - origin) / 1e3}


_FIRST, _KEPT = 8, 16
_SOON, _LATER = 0.05, 5.0


class ClockOffset:
    """Asks rank 0 for the time; on rank 0 answers.

    Args:
        channel: between the ranks.
        same: whether this process reads the same clock as rank 0, being on its host.

    Attributes:
        uncertainty: nanoseconds by which `offset` may be wrong; 0 where the clock is the same.
    """

    def __init__(self, channel: Channel, same: bool) -> None:
        self._channel, self._same = channel, same
        self._answers: deque[tuple[int, int]] = deque(maxlen=_KEPT)  # how long it took, offset
        self._asked, self._next = 0, 0.0
        channel.on("what time", lambda sender, body: channel.tell(sender, "time", {**body, "time": monotonic_ns()}))
        channel.on("time", self._note)

    @property
    def is_known(self) -> bool:
        return self._same or len(self._answers) >= _FIRST // 2

    @property
    def offset(self) -> int:
        """Nanoseconds to add to `time.monotonic_ns` here to have it as on rank 0."""
        return 0 if self._same or not self._answers else min(self._answers)[1]

    @property
    def uncertainty(self) -> int:
        return 0 if self._same or not self._answers else min(self._answers)[0] // 2

    def ask(self, now: float) -> None:
        """Ask again where it is time to; called often."""
        if not self._same and now >= self._next:
            self._asked += 1
            self._next = now + (_SOON if self._asked < _FIRST else _LATER)
            self._channel.tell(0, "what time", {"asked": monotonic_ns()}, droppable=True)

    def _note(self, sender: int, body: Body) -> None:
        now = monotonic_ns()
        self._answers.append((now - body["asked"], body["time"] - (body["asked"] + now) // 2))


#: Seconds between the messages of a rank, spans in one, and seconds that a rank waits to learn its clock's offset.
_PERIOD, _SPANS, _PATIENCE = 1.0, 2000, 5.0
#: When the file is as large it becomes the previous one, and a new one begins.
_LARGEST = 64 << 20


class TimelineReports:
    """A service of every rank's guard: while rank 0 wants it, records spans and sends them there.

    Args:
        channel: to rank 0.
        same_clock: whether this process is on rank 0's host.
    """

    def __init__(self, channel: Channel, same_clock: bool) -> None:
        self._channel = channel
        self._clock = ClockOffset(channel, same_clock)
        self._began = self._next = 0.0
        channel.on("record", self._switch)

    def _switch(self, sender: int, body: Body) -> None:
        if body["on"]:
            recorder.take()
            self._began = time.monotonic()
            recorder.on = True
        elif recorder.on:
            recorder.on = False
            self.send()
            self._channel.tell(0, "recorded", {"uncertainty": self._clock.uncertainty, "lost": recorder.lost})

    def tick(self, now: float) -> None:
        if not recorder.on:
            return
        self._clock.ask(now)
        if now >= self._next and (self._clock.is_known or now - self._began > _PATIENCE):
            self._next = now + _PERIOD
            self.send()

    def send(self) -> None:
        """Send what there is; any thread may call it."""
        spans, offset = recorder.take(), self._clock.offset
        for start in range(0, len(spans), _SPANS):
            rows = [_on_rank_0s_clock(span, offset) for span in spans[start : start + _SPANS]]
            self._channel.tell(0, "spans", {"rows": rows}, droppable=True)

    def close(self) -> None:
        self._switch(0, {"on": False})


def _on_rank_0s_clock(span: Span, offset: int) -> list[Any]:
    arguments = span.arguments
    if span.kind == "bucket":
        arguments = {**arguments, **{key: arguments[key] + offset for key in ("launched", "started")}}
    return [span.kind, span.name, span.begin + offset, span.end + offset, arguments]


class TimelineAggregator:
    """A service of rank 0's guard: writes what all ranks record to one file.

    The file is a JSON array that grows; viewers read one whose end is missing, so what there is when a job is killed
    can be looked at. Larger than 64 MiB it becomes `timeline.previous.json`, in place of the one before it.

    Args:
        channel: to all ranks.
        roster: where they are.
    """

    def __init__(self, channel: Channel, membership: Sequence[Peer]) -> None:
        self._channel, self._roster = channel, membership
        self._directory: Path | None = None
        self._file: IO[str] | None = None
        self._origin = 0
        self._awaited: set[int] = set()
        channel.on("spans", self._write)
        channel.on("recorded", self._note_end)
        channel.on_joined = self._joined

    def start(self, directory: Path) -> None:
        """Record from now on; called by any thread.

        Raises:
            OSError: the directory cannot be made or written to.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._origin = directory, monotonic_ns()
        self._open()
        self._channel.tell(0, "record", {"on": True})
        self._channel.tell(EVERYONE, "record", {"on": True})

    def stop(self) -> None:
        """Ask all ranks for the rest; `is_complete` tells when it is there."""
        if self._file is not None:
            self._awaited = {0, *self._channel.connected}
            self._channel.tell(0, "record", {"on": False})
            self._channel.tell(EVERYONE, "record", {"on": False})

    @property
    def is_complete(self) -> bool:
        """Whether all ranks that are still there have sent the rest."""
        return not self._awaited & {0, *self._channel.connected}

    def finish(self) -> Path | None:
        """Close the file and return its path; None where there is none."""
        file, self._file = self._file, None
        if file is None or self._directory is None:
            return None
        file.write("\n]\n")
        file.close()
        return self._directory / "timeline.json"

    def tick(self, now: float) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is None:
            return
        self.stop()
        end = time.monotonic() + 2.0
        while not self.is_complete and time.monotonic() < end:
            self._channel.poll(0.02)
        self.finish()

    def _note_end(self, sender: int, body: Body) -> None:
        self._awaited.discard(sender)
        if self._file is not None:
            self._file.write(",\n" + json.dumps(label(sender, body["uncertainty"], body["lost"])))

    def _joined(self, rank: int) -> None:
        if self._file is not None:
            self._channel.tell(rank, "record", {"on": True})

    def _open(self) -> None:
        assert self._directory is not None
        self._file = (self._directory / "timeline.json").open("w")
        lines = [json.dumps(event) for rank, peer in enumerate(self._roster) for event in header(rank, peer.host)]
        self._file.write("[\n" + ",\n".join(lines))

    def _write(self, sender: int, body: Body) -> None:
        if self._file is None or self._directory is None:
            return
        for row in body["rows"]:
            for event in events(sender, row, self._origin):
                self._file.write(",\n" + json.dumps(event))
        self._file.flush()
        if self._file.tell() > _LARGEST:
            self._file.write("\n]\n")
            self._file.close()
            (self._directory / "timeline.json").replace(self._directory / "timeline.previous.json")
            self._open()
