"""A timeline of all ranks in one file, written while the job runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic_ns
from typing import IO, Any

from ring_plugins.core.control.channel import EVERYONE, Body, Channel
from ring_plugins.core.failure import Peer
from ring_plugins.core.observe.clock import ClockOffset
from ring_plugins.core.observe.recorder import Span, recorder
from ring_plugins.core.observe.trace_events import events, header, label

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


class TimelineDesk:
    """A service of rank 0's guard: writes what all ranks record to one file.

    The file is a JSON array that grows; viewers read one whose end is missing, so what there is when a job is killed
    can be looked at. Larger than 64 MiB it becomes `timeline.previous.json`, in place of the one before it.

    Args:
        channel: to all ranks.
        roster: where they are.
    """

    def __init__(self, channel: Channel, roster: Sequence[Peer]) -> None:
        self._channel, self._roster = channel, roster
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


class Timeline:
    """Records a timeline of all ranks while it is open; all ranks use it, rank 0 writes.

        with Timeline("traces"):
            ...  # some steps

    Args:
        directory: where rank 0 puts `timeline.json`.

    Raises:
        OSError: on rank 0, where it cannot write there.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def start(self) -> None:
        """Record from now on."""
        desk = self._desk()
        if desk is not None:
            desk.start(self._directory)
        if self._is_watched():
            _wait_until(lambda: recorder.on)

    def stop(self) -> Path | None:
        """Stop, and return the file's path on rank 0, None elsewhere."""
        desk = self._desk()
        if desk is None:
            # Rank 0 says when it ends; what this rank does after its own end is not to be in the timeline.
            _wait_until(lambda: not recorder.on)
            return None
        desk.stop()
        _wait_until(lambda: desk.is_complete)
        return desk.finish()

    def __enter__(self) -> Timeline:  # noqa: PYI034 - Self needs Python 3.11; nobody inherits
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._desk() is not None:  # a rank that failed does not wait for rank 0 before it says so
            self.stop()

    @staticmethod
    def _is_watched() -> bool:
        from ring_plugins.core.world import current, is_initialised

        return is_initialised() and current().observers is not None

    @classmethod
    def _desk(cls) -> TimelineDesk | None:
        from ring_plugins.core.world import current

        observers = current().observers if cls._is_watched() else None
        return observers.timeline if observers is not None else None


def _wait_until(reached: Callable[[], bool]) -> None:
    """Give rank 0's word time to arrive; a timeline is never worth more than a few seconds of waiting."""
    end = time.monotonic() + _PATIENCE
    while not reached() and time.monotonic() < end:
        time.sleep(0.01)
