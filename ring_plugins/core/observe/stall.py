"""Stalls and deadlocks: rank 0 collects long waits, asks the missing ranks what they are doing, and tells the user.

A collective hangs on every rank when one rank does not call it, and the ranks that hang do not know why. So each rank
reports a wait that lasts (`report_wait`, later `end_wait`), and rank 0 keeps all of them in one table, in which it
looks for two things:

- *Deadlocks.* Ranks whose scripts wait for each other in a circle can never continue if none has begun the operation in
  which the one before it waits, and nothing but its script will begin it. If it has begun, only bytes are on their way,
  however slowly. Rank 0 sees who waits for whom, but its table may be out of date, and only the ranks know what they
  have begun or queued. So rank 0 asks them (`confirm_wait`, `answer_wait`) and only then tells them
  (`declare_deadlock`); each looks at its own side once more, and raises in the wait (observe/deadlock.py). A rank that
  is stopped or holds the GIL does not answer, and there is no verdict.
- *Stalls.* From RING_STALL_WARNING seconds on, rank 0 asks the missing ranks for their stack and last operation
  (`request_snapshot`, `report_snapshot`). Native code that holds the GIL and a stopped process cannot answer, so other
  ranks of the same host look up the process in /proc (`request_process_state`, `report_process_state`). Rank 0 prints
  a report of the answers (`stall_report`), and repeats it after pauses that double.

All of this runs in the monitor threads, beside the job.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.base.member import Members
from ring_plugins.core.collectives.api import Activity
from ring_plugins.core.control.channel import Body, Channel
from ring_plugins.core.control.failure_detector import IN_ONE, FailureDetector
from ring_plugins.core.control.wait import LongWait, hindrances, long_waits, waits_of_communicators
from ring_plugins.core.observe.deadlock import DeadlockFinder
from ring_plugins.core.observe.stall_report import (
    Absent,
    Waiting,
    process_snapshot,
    process_state,
    stall_report,
    without_arrived_gpus,
)
from ring_plugins.core.trace.steps import steps

#: Seconds from which a wait is reported to rank 0; ranks in step wait for less.
_REPORT_AFTER = 1.5
#: Seconds from which the script itself counts as blocked by a wait, rather than just about to begin one.
_BLOCKED_AFTER = 1.0
#: Seconds that rank 0 waits for an answer of a missing rank; ranks of its host get twice as long to look at it.
_ANSWER = 2.0
#: Limits: missing ranks that are asked for a snapshot, and ranks of its host that look at each of them.
_ASKED, _LOOKING = 8, 2
#: Seconds of the longest pause between two reports.
_LONGEST_PAUSE = 600.0


# On every rank ------------------------------------------------------------------------------------


class _Reported(NamedTuple):
    """A wait as it was last reported to rank 0."""

    number: int
    since: float
    missing: tuple[int, ...]
    is_blocked: bool


class StallWatch:
    """A service of every rank's monitor thread: reports long waits to rank 0 and answers its questions.

    Args:
        channel: to rank 0.
        failure_detector: is told of the deadlocks that rank 0 finds.
        activities: returns the last operation of this rank in each communicator.
    """

    def __init__(
        self, channel: Channel, failure_detector: FailureDetector, activities: Callable[[], Iterable[Activity]]
    ) -> None:
        self._channel, self._failure_detector, self._activities = channel, failure_detector, activities
        self._reported: dict[Hashable, _Reported] = {}  # by the keys of `long_waits`
        self._numbers = itertools.count()
        channel.on("request_snapshot", self._send_snapshot)
        channel.on("request_process_state", self._send_process_state)
        channel.on("confirm_wait", self._confirm)
        channel.on("declare_deadlock", self._end_deadlock)

    def tick(self, now: float) -> None:
        waits = dict(long_waits)
        for key, reported in list(self._reported.items()):
            if key not in waits or waits[key].since != reported.since:
                del self._reported[key]
                self._channel.tell(self._channel.leader, "end_wait", {"number": reported.number})
        for key, wait in waits.items():
            if now - wait.since < _REPORT_AFTER:
                continue
            is_blocked = now - wait.blocked_since > _BLOCKED_AFTER
            before = self._reported.get(key)
            number = before.number if before is not None else next(self._numbers)
            reported = _Reported(number, wait.since, wait.missing, is_blocked)
            if reported != before:
                self._reported[key] = reported
                body = {"number": number, "wait": _wait_body(wait, now, is_blocked)}
                self._channel.tell(self._channel.leader, "report_wait", body)

    def report_again(self) -> None:
        """Report the waits that last to another rank, which takes the place of rank 0."""
        self._reported.clear()

    def close(self) -> None:
        pass

    def _send_snapshot(self, sender: int, body: Body) -> None:
        snapshot = process_snapshot(self._activities())
        self._channel.tell(sender, "report_snapshot", {"inquiry": body["inquiry"], **snapshot})

    def _send_process_state(self, sender: int, body: Body) -> None:
        """Look at another process of this host that may be unable to answer."""
        state = process_state(int(body["pid"]))
        self._channel.tell(sender, "report_process_state", {"inquiry": body["inquiry"], "rank": body["rank"], **state})

    def _confirm(self, sender: int, body: Body) -> None:
        waits = self._still_waits(body["number"]) and not self._may_begin(body["deadlock"], "needs")
        answer = {"waits": waits, "deadlock": body["deadlock"]}
        self._channel.tell(sender, "answer_wait", answer)

    def _end_deadlock(self, sender: int, body: Body) -> None:
        if self._still_waits(body["number"]) and not self._may_begin(body, "awaited"):
            self._failure_detector.deadlocks[body["communicator"]] = body["text"]

    def _still_waits(self, number: int) -> bool:
        """Whether the wait that rank 0 knows by this number has not ended meanwhile."""
        waits = dict(long_waits)
        return any(
            reported.number == number and key in waits and waits[key].since == reported.since
            for key, reported in self._reported.items()
        )

    def _may_begin(self, deadlock: Body, whose: str) -> bool:
        """Whether this rank has begun the operation in which the other one waits, or may without its script.

        Args:
            deadlock: as rank 0 describes it.
            whose: "needs" for the operation of the rank that is to be told, "awaited" for that of the other one.
        """
        if whose not in deadlock:
            return False
        identity, number, rank = deadlock[whose]
        wait = waits_of_communicators.get(identity) or waits_of_communicators.get(identity.partition(IN_ONE)[0])
        if wait is not None:
            return wait.will_enter(number)
        # Two ranks that are about to connect. The other end may be under way here too, also beside the script.
        now = time.monotonic()
        return any(
            other.communicator == identity or (rank in other.missing and now - other.blocked_since < _BLOCKED_AFTER)
            for other in list(long_waits.values())
        )


def _wait_body(wait: LongWait, now: float, is_blocked: bool) -> Body:
    """The attributes of a `Waiting` but the rank, with seconds so far in place of times, since clocks differ."""
    return {
        **wait._asdict(),
        "since": now - wait.since,
        "blocked_since": now - wait.blocked_since if is_blocked else 0.0,
        "clock": time.strftime("%H:%M:%S", time.localtime(time.time() - (now - wait.since))),
        "step": steps.count,
        "hindrances": " ".join(list(hindrances.values())),
    }


# On rank 0 ----------------------------------------------------------------------------------------


class _Inquiry(NamedTuple):
    """The questions about missing ranks, and the answers so far.

    Attributes:
        number: answers to other inquiries are ignored.
        asked: the missing ranks.
        snapshots, states: answers by rank, see `process_snapshot` and `process_state`.
        snapshots_until, states_until: times of `time.monotonic` at which rank 0 stops waiting for them.
    """

    number: int
    asked: tuple[int, ...]
    snapshots: dict[int, Body]
    states: dict[int, Body]
    snapshots_until: float
    states_until: float


class StallAggregator:
    """A service of rank 0's monitor thread: finds deadlocks, reports stalls, and ends a stalled job if asked to.

    Args:
        channel: to all ranks.
        members: of the job.
        warning: seconds of waiting from which the user is warned.
        abort: seconds of waiting from which the job is ended, 0 for never.
        warn: prints a report.
    """

    def __init__(
        self, channel: Channel, members: Members, warning: float, abort: float, warn: Callable[[str], None]
    ) -> None:
        self._channel, self._members, self._warn = channel, members, warn
        self._warning, self._abort = min(warning, abort or warning), abort
        self._waits: dict[tuple[int, int], Waiting] = {}  # by rank and its number of the wait
        self._deadlocks = DeadlockFinder(channel, self._waits)
        self._pause, self._next_report, self._has_reported, self._has_aborted = self._warning, 0.0, False, False
        self._inquiry: _Inquiry | None = None
        self._inquiries = itertools.count(1)
        channel.on("report_wait", self._note_wait)
        channel.on("end_wait", self._note_end)
        channel.on("report_snapshot", self._note_snapshot)
        channel.on("report_process_state", self._note_process_state)

    def _note_wait(self, sender: int, body: Body) -> None:
        now, wait = time.monotonic(), Waiting(sender, **body["wait"])
        self._waits[sender, body["number"]] = wait._replace(
            missing=tuple(wait.missing),
            since=now - wait.since,
            blocked_since=now - wait.blocked_since if wait.blocked_since else 0.0,
        )

    def awaits(self, rank: int, since: float) -> bool:
        """Whether the script of another rank has waited for this one since before a time; for any thread."""
        waits = list(self._waits.values())
        return any(wait.blocked_since and wait.since < since and rank in wait.missing for wait in waits)

    def _note_end(self, sender: int, body: Body) -> None:
        self._waits.pop((sender, body["number"]), None)

    def tick(self, now: float) -> None:
        if not self._waits and not self._has_reported:
            return
        for key in [key for key in self._waits if key[0] not in self._members.ranks]:  # the job goes on without it
            del self._waits[key]
        self._deadlocks.tick(now)
        stalled = [
            wait for wait in without_arrived_gpus(list(self._waits.values())) if now - wait.since >= self._warning
        ]
        if not stalled:
            if self._has_reported:
                self._warn("the stall is over; the job continues.")
            self._pause, self._next_report, self._has_reported, self._inquiry = self._warning, 0.0, False, None
            return
        if self._inquiry is not None:
            self._finish_inquiry(self._inquiry, stalled, now)
        elif now >= self._next_report or self._must_abort(stalled, now):
            self._begin_inquiry(stalled, now)

    def close(self) -> None:
        pass

    # Stalls

    def _begin_inquiry(self, stalled: Sequence[Waiting], now: float) -> None:
        """Ask the missing ranks what they are doing; only those that are not waiting themselves, if there are any."""
        waiting = {wait.rank for wait in stalled}
        missing = {rank for wait in stalled for rank in wait.missing}
        asked = (sorted(missing - waiting) or sorted(missing))[:_ASKED]
        number = next(self._inquiries)
        self._inquiry = _Inquiry(number, tuple(asked), {}, {}, now + _ANSWER, now + 2 * _ANSWER)
        for rank in asked:
            self._channel.tell(rank, "request_snapshot", {"inquiry": number})
            peer = self._members.known[rank]
            near = [r for r in self._members.ranks if self._members.known[r].domain == peer.domain and r != rank]
            for neighbor in near[:_LOOKING]:
                request = {"inquiry": number, "rank": rank, "pid": peer.pid}
                self._channel.tell(neighbor, "request_process_state", request)

    def _note_snapshot(self, sender: int, body: Body) -> None:
        if self._inquiry is not None and body["inquiry"] == self._inquiry.number:
            self._inquiry.snapshots[sender] = body

    def _note_process_state(self, sender: int, body: Body) -> None:
        if self._inquiry is not None and body["inquiry"] == self._inquiry.number:
            self._inquiry.states[body["rank"]] = body

    def _finish_inquiry(self, inquiry: _Inquiry, stalled: Sequence[Waiting], now: float) -> None:
        """Print the report once the answers are there or overdue."""
        silent = [rank for rank in inquiry.asked if rank not in inquiry.snapshots]
        if silent and now < inquiry.snapshots_until:
            return
        if any(rank not in inquiry.states for rank in silent) and now < inquiry.states_until:
            return
        self._inquiry = None
        absent = {rank: Absent(inquiry.snapshots.get(rank), inquiry.states.get(rank)) for rank in inquiry.asked}
        step = max(wait.step for wait in stalled)
        self._warn(stall_report(stalled, absent, self._members, step, now, self._pause))
        self._has_reported, self._next_report = True, now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if self._must_abort(stalled, now):
            self._has_aborted = True
            self._abort_job(stalled, inquiry.asked)

    def _must_abort(self, stalled: Sequence[Waiting], now: float) -> bool:
        longest = now - min(wait.since for wait in stalled)
        return bool(self._abort) and not self._has_aborted and longest >= self._abort

    def _abort_job(self, stalled: Sequence[Waiting], missing: Sequence[int]) -> None:
        first = min(stalled, key=lambda wait: wait.since)
        culprits = missing or [first.rank]
        text = (
            f"{name_ranks(culprits)} did not {'reach' if missing else 'finish'} {first.operation} within "
            f"RING_STALL_ABORT={self._abort:g} seconds; the report on rank 0 shows what happened there."
        )
        self._channel.tell(self._channel.rank, "failed", {"rank": culprits[0], "text": text, "of": -1, "lost": True})
