"""A timeline of all ranks in one file, on one clock, written while the job runs.

While rank 0 writes a timeline, every rank records spans (`core.trace.recorder`) and sends them about once a second.
Rank 0 writes them as trace events for Perfetto (ui.perfetto.dev) and chrome://tracing: a process per rank, a row per
thread. The file is a JSON array that grows. Viewers accept an array without its end, so the file of a job that was
killed is readable.

Clocks of other hosts differ from rank 0's, so each rank adds the offset between the two before it sends. It finds the
offset as in Cristian, "Probabilistic clock synchronization" (1989): it asks for the time repeatedly and keeps the
answer with the shortest round trip. Rank 0 is assumed to have read its clock in the middle of the round trip, which is
wrong by at most half of it.

With RING_TIMELINE every rank records from its first operation until it leaves the job. Ranks leave one after the other,
and rank 0 may be the first. So rank 0 waits before it closes the file: first for the other ranks to leave by
themselves, then it asks those that are still busy for their last spans.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic_ns
from typing import IO, Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.member import Members
from ring_plugins.core.control.channel import EVERYONE, Body, Channel
from ring_plugins.core.rendezvous import detect
from ring_plugins.core.trace.recorder import recorder

#: A `Span` as it is sent: kind, name, begin and end in nanoseconds on rank 0's clock, arguments.
Row = tuple[str, str, int, int, dict[str, Any]]
Event = dict[str, Any]

#: In the directory that the user names.
FILE_NAME = "timeline.json"

#: Requests for the time that are sent quickly at first, and answers that are kept.
_FIRST, _KEPT = 8, 16
#: Seconds between the first requests, and between later ones, since clocks drift apart.
_SOON, _LATER = 0.05, 5.0
#: Seconds between messages with spans, spans in one message, and seconds that a rank waits to learn its offset.
_PERIOD, _SPANS, _PATIENCE = 1.0, 2000, 5.0
#: Seconds that rank 0 waits at shutdown for the others to leave, then for their last spans; another rank may take as
#: long as the latter to send its own. The sum stays below the patience of `MonitorThread.close`.
_LEAVING, _LAST_SPANS = 1.0, 2.0
#: Seconds that a rank may take, when it leaves, to learn the offset of its clock.
_LAST_ANSWERS = 0.3
#: Bytes from which the file is renamed and a new one begins.
_LARGEST = 64 << 20


def check_directory(ranks: int | None) -> None:
    """Reject a RING_TIMELINE in which rank 0 cannot write, before the other ranks wait for it.

    Args:
        ranks: that `init` is asked for.

    Raises:
        ArgumentError: the directory cannot be made or written to.
    """
    name, record = config.TIMELINE.get(), detect()
    if not name or record.rank or (record.launcher.is_none and (ranks or 1) == 1):
        return
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
        (Path(name) / FILE_NAME).open("a").close()  # to root, os.access allows everything
    except OSError as error:
        raise ArgumentError(
            f"{config.TIMELINE.name}={name!r}: rank 0 cannot write there ({error.strerror}); name a directory that it "
            "can create, or unset the variable."
        ) from None  # one traceback, not one for each parent that `mkdir` has tried


# On every rank ------------------------------------------------------------------------------------


class TimelineReporter:
    """A service of every rank's monitor thread: records spans while rank 0 asks for them, and sends them there.

    Args:
        channel: to rank 0.
        same_clock: whether this process reads the same clock as rank 0, being on its host.
    """

    def __init__(self, channel: Channel, same_clock: bool) -> None:
        self._channel = channel
        self._clock = ClockOffset(channel, same_clock)
        self._began = self._next = 0.0
        self._lock = threading.Lock()  # of the next two, which the script's thread changes
        self._is_held = self._is_to_end = False
        channel.on("switch_recording", lambda sender, body: self._switch(body["on"]))

    def start(self) -> None:
        """Record from now on."""
        recorder.take()
        recorder.lost = 0
        self._began = time.monotonic()
        recorder.on = True

    def hold(self) -> None:
        """Let the recording go on until `release`, if rank 0 ends it before: this rank may be in its last operation."""
        with self._lock:
            self._is_held, self._is_to_end = True, False

    def release(self) -> None:
        """End what `hold` began; called by any thread."""
        with self._lock:
            self._is_held = False
            is_to_end = self._is_to_end
        if is_to_end:
            self._switch(False)

    def _switch(self, on: bool) -> None:
        if on and not recorder.on:  # with RING_TIMELINE it is on from the first operation
            self.start()
        elif not on:
            with self._lock:
                self._is_to_end = True
                if self._is_held or not recorder.on:
                    return
                recorder.on = False
            self.flush(droppable=False)
            self._channel.tell(0, "end_recording", {"uncertainty": self._clock.uncertainty, "lost": recorder.lost})

    def tick(self, now: float) -> None:
        if not recorder.on:
            return
        self._clock.ask(now)
        if now >= self._next and (self._clock.is_known or now - self._began > _PATIENCE):
            self._next = now + _PERIOD
            self.flush()

    def flush(self, droppable: bool = True) -> None:
        """Send the spans so far; any thread may call it.

        Args:
            droppable: whether they may be dropped when the network is too slow.
        """
        rows, offset = [], self._clock.offset
        for kind, name, begin, end, arguments in recorder.take():
            moved = {key: arguments[key] + offset for key in ("launched", "started")} if kind == "bucket" else {}
            rows.append([kind, name, begin + offset, end + offset, arguments | moved])
        for start in range(0, len(rows), _SPANS):
            self._channel.tell(0, "report_spans", {"rows": rows[start : start + _SPANS]}, droppable=droppable)

    def close(self) -> None:
        if not recorder.on:
            return
        end = time.monotonic() + _LAST_ANSWERS
        while not self._clock.is_known and time.monotonic() < end:
            self._clock.ask(time.monotonic())
            self._channel.poll(0.02)
        self.release()
        self._switch(False)
        self._channel.flush(_LAST_SPANS)


class ClockOffset:
    """The offset between this process's clock and rank 0's; on rank 0 it answers the others' requests.

    Args:
        channel: between the ranks.
        same: whether this process reads the same clock as rank 0.
    """

    def __init__(self, channel: Channel, same: bool) -> None:
        self._channel, self._same = channel, same
        self._answers: deque[tuple[int, int]] = deque(maxlen=_KEPT)  # round trip in nanoseconds, offset
        self._asked, self._next = 0, 0.0
        channel.on("request_time", self._answer)
        channel.on("report_time", self._note)

    @property
    def is_known(self) -> bool:
        return self._same or len(self._answers) >= _FIRST // 2

    @property
    def offset(self) -> int:
        """Nanoseconds to add to `time.monotonic_ns` here to get rank 0's."""
        return 0 if self._same or not self._answers else min(self._answers)[1]

    @property
    def uncertainty(self) -> int:
        """Nanoseconds by which `offset` may be wrong; 0 if the clock is the same."""
        return 0 if self._same or not self._answers else min(self._answers)[0] // 2

    def ask(self, now: float) -> None:
        """Ask rank 0 for the time if a request is due; called often."""
        if not self._same and now >= self._next:
            self._asked += 1
            self._next = now + (_SOON if self._asked < _FIRST else _LATER)
            self._channel.tell(0, "request_time", {"asked": monotonic_ns()}, droppable=True)

    def _answer(self, sender: int, body: Body) -> None:
        self._channel.tell(sender, "report_time", {**body, "time": monotonic_ns()})

    def _note(self, sender: int, body: Body) -> None:
        now = monotonic_ns()
        self._answers.append((now - body["asked"], body["time"] - (body["asked"] + now) // 2))


# On rank 0 ----------------------------------------------------------------------------------------


class TimelineAggregator:
    """A service of rank 0's monitor thread: writes the spans of all ranks to one file.

    At 64 MiB the file is renamed to `timeline.previous.json`, which replaces the one before it.

    Args:
        channel: to all ranks.
        members: of the job.
    """

    def __init__(self, channel: Channel, members: Members) -> None:
        self._channel, self._members = channel, members
        self._directory: Path | None = None
        self._file: IO[str] | None = None
        self._origin = 0
        self._lock = threading.Lock()  # `Timeline.stop` closes the file that the monitor thread writes
        self._recording: set[int] = set()
        self._joined = {0}
        channel.on("report_spans", self._write, droppable=True)
        channel.on("end_recording", self._note_end)
        channel.on_joined(self._note_joined)

    def start(self, directory: Path) -> None:
        """Record from now on; called by any thread.

        Raises:
            OSError: the directory cannot be created or written to.
        """
        directory.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._directory, self._origin = directory, monotonic_ns()
            self._open()
        self._switch(True)

    def stop(self) -> None:
        """Ask all ranks for their last spans; `is_complete` says when all have arrived."""
        if self._file is not None:
            self._recording = {0, *self._channel.connected}
            self._switch(False)

    def _switch(self, on: bool) -> None:
        self._channel.tell(0, "switch_recording", {"on": on})
        self._channel.tell(EVERYONE, "switch_recording", {"on": on})

    @property
    def is_complete(self) -> bool:
        """Whether all ranks that are still connected have sent their last spans."""
        return not self._recording & {0, *self._channel.connected}

    def finish(self) -> Path | None:
        """Close the file and return its path, None if there is none."""
        with self._lock:
            file, self._file = self._file, None
            if file is None or self._directory is None:
                return None
            file.write("\n]\n")
            file.close()
            return self._directory / FILE_NAME

    def tick(self, now: float) -> None:
        with self._lock:
            if self._file is not None:
                self._file.flush()

    def close(self) -> None:
        if self._file is None:
            return
        self._recording = set(range(self._channel.size))
        # Until all have sent the end of their recording or are gone, which one that is still connecting has not.
        joined, connected = self._joined, self._channel.connected
        self._wait_until(lambda: all(one in joined and one not in connected for one in self._recording - {0}), _LEAVING)
        self._switch(False)
        self._wait_until(lambda: self.is_complete, _LAST_SPANS)
        self.finish()

    def _wait_until(self, reached: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not reached() and time.monotonic() < end:
            self._channel.poll(0.02)

    def _note_joined(self, rank: int) -> None:
        self._joined.add(rank)
        if self._file is not None:
            self._channel.tell(rank, "switch_recording", {"on": True})

    def _note_end(self, sender: int, body: Body) -> None:
        with self._lock:
            if self._file is not None:
                uncertainty, lost = body["uncertainty"], body["lost"]
                text = "rank 0's clock" if uncertainty == 0 else f"clock within {uncertainty / 1e3:.0f} µs of rank 0's"
                text += f", {lost} spans lost" if lost else ""
                label = {"labels": text, "uncertainty": uncertainty}  # beside the rank's name
                event = {"ph": "M", "pid": sender, "name": "process_labels", "args": label}
                self._file.write(",\n" + json.dumps(event))
        self._recording.discard(sender)  # last: a thread that waits for `is_complete` then closes the file

    def _open(self) -> None:
        assert self._directory is not None
        self._file = (self._directory / FILE_NAME).open("w")
        events: list[Event] = []
        for rank, peer in self._members.known.items():
            for what, thread, name in (("process_name", 0, f"rank {rank} on {peer.host}"), *_THREAD_NAMES):
                events.append({"ph": "M", "pid": rank, "tid": thread, "name": what, "args": {"name": name}})
            events.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})
        self._file.write("[\n" + ",\n".join(map(json.dumps, events)))

    def _write(self, sender: int, body: Body) -> None:
        with self._lock:
            if self._file is None or self._directory is None:
                return
            for row in body["rows"]:
                for event in span_events(sender, row, self._origin):
                    self._file.write(",\n" + json.dumps(event))
            self._file.flush()
            if self._file.tell() > _LARGEST:
                self._file.write("\n]\n")
                self._file.close()
                (self._directory / FILE_NAME).replace(self._directory / "timeline.previous.json")
                self._open()


# Trace events -------------------------------------------------------------------------------------

_SCRIPT, _COMMUNICATION, _GPU = 0, 1, 2
#: The row of each kind of span.
_THREADS = dict.fromkeys(("step", "backward", "wait", "call"), _SCRIPT) | {"operation": _COMMUNICATION, "gpu": _GPU}
_THREAD_NAMES = [
    ("thread_name", _SCRIPT, "script"),
    ("thread_name", _COMMUNICATION, "communication"),
    ("thread_name", _GPU, "communication on the GPU"),
]

_bucket_ids = itertools.count(1)


def span_events(rank: int, row: Row, origin: int) -> Iterator[Event]:
    """The events of a span.

    Args:
        rank: whose span it is.
        row: the span.
        origin: nanoseconds on rank 0's clock that count as 0.
    """
    kind, name, begin, end, arguments = row
    if kind != "bucket":
        yield {
            "ph": "X",
            "pid": rank,
            "tid": _THREADS.get(kind, _SCRIPT),
            "cat": kind,
            "name": f"wait for {name}" if kind == "wait" else name,
            "ts": (begin - origin) / 1e3,
            "dur": max(0, end - begin) / 1e3,
            "args": arguments,
        }
        return
    # Buckets overlap, so they have rows of their own: ready, launched, started, reduced.
    launched, started = int(arguments["launched"]), int(arguments["started"])
    common = {"pid": rank, "tid": _COMMUNICATION, "cat": kind, "id": next(_bucket_ids)}
    parts = [
        (name, begin, end, {"nbytes": arguments["nbytes"]}),
        ("until launched", begin, launched, {}),
        ("until its turn", launched, started, {}),
        ("reducing", started, end, {}),
    ]
    for part, first, last, more in parts:
        yield {**common, "ph": "b", "name": part, "ts": (first - origin) / 1e3, "args": more}
        yield {**common, "ph": "e", "name": part, "ts": (max(first, last) - origin) / 1e3}
