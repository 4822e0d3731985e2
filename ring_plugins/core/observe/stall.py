"""Every rank's part in stall reports: it says what it waits for, and what it is doing when asked.

Rank 0's part in stall reports: it knows who waits for whom, asks those who are missing, and tells the user.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from ring_plugins.core.collectives.api import Activity
from ring_plugins.core.control.channel import Body, Channel
from ring_plugins.core.control.failure_detector import FailureDetector, Peer
from ring_plugins.core.control.wait import LongWait, long_waits
from ring_plugins.core.observe.stall_report import (
    Absent,
    Waiting,
    kernel_account,
    own_account,
    report,
    without_those_who_came,
)
from ring_plugins.core.trace.steps import steps

#: Seconds until two ranks that wait for each other in different communicators are told that it is in vain, and the same
#: for different operations of one communicator, where data may still be on its way unless it is the n-th for both.
_DEADLOCK, _DEADLOCK_IN_ONE = 2.0, 10.0
#: Seconds for an answer; how many of the missing are asked; the longest pause between reports.
_ANSWER, _ASKED, _LONGEST_PAUSE = 2.0, 8, 600.0


class _Inquiry(NamedTuple):
    """Questions that are out."""

    number: int
    asked: tuple[int, ...]
    accounts: dict[int, Body]
    seen: dict[int, Body]
    answers_until: float
    looks_until: float


class StallAggregator:
    """A service of rank 0's guard.

    Args:
        channel: to all ranks.
        roster: where they are.
        warning: seconds of waiting from which the user is told.
        abort: seconds from which the job is ended, 0 for never.
        say: prints.
    """

    def __init__(
        self, channel: Channel, membership: Sequence[Peer], warning: float, abort: float, say: Callable[[str], None]
    ) -> None:
        self._channel, self._roster, self._say = channel, membership, say
        self._warning, self._abort = min(warning, abort or warning), abort
        self._waits: dict[tuple[int, int], Waiting] = {}
        self._judged: set[tuple[int, int]] = set()
        self._pause, self._next_report, self._reported, self._aborted = self._warning, 0.0, False, False
        self._inquiry: _Inquiry | None = None
        self._questions = 0
        channel.on("waiting", self._note_waiting)
        channel.on("came", self._note_coming)
        channel.on("here", self._note_account)
        channel.on("seen", self._note_seen)
        channel.on("i wait", self._note_confirmed)

    def _note_waiting(self, sender: int, body: Body) -> None:
        now = time.monotonic()
        self._waits[sender, body["number"]] = Waiting(
            sender,
            body["communicator"],
            body["what"],
            body["number_of_operation"],
            body["part_of"],
            tuple(body["missing"]),
            now - body["seconds"],
            now - body["blocked"] if body["blocked"] else 0.0,
            body["clock"],
            body["on_gpu"],
        )

    def _note_coming(self, sender: int, body: Body) -> None:
        self._waits.pop((sender, body["number"]), None)

    def tick(self, now: float) -> None:
        if not self._waits and not self._reported:
            return
        self._judge_deadlocks(now)
        everyones = without_those_who_came(list(self._waits.values()))
        stalled = [wait for wait in everyones if now - wait.since >= self._warning]
        if not stalled:
            if self._reported:
                self._say("the stall is over; the job goes on.")
            self._pause, self._next_report, self._reported, self._inquiry = self._warning, 0.0, False, None
            return
        must_end = self._abort and not self._aborted and now - min(w.since for w in stalled) >= self._abort
        if self._inquiry is not None:
            self._pursue(self._inquiry, stalled, now)
        elif now >= self._next_report or must_end:
            self._ask(stalled, now)

    def close(self) -> None:
        pass

    # Deadlocks ------------------------------------------------------------------------------------

    def _judge_deadlocks(self, now: float) -> None:
        """Tell ranks whose scripts wait for each other in different operations, across hosts as well."""
        blocked = {key: wait for key, wait in self._waits.items() if wait.blocked_since and key not in self._judged}
        by_rank: dict[int, list[tuple[int, Waiting]]] = {}
        for (rank, number), wait in blocked.items():
            by_rank.setdefault(rank, []).append((number, wait))
        for key, mine in blocked.items():
            for number, theirs in (found for rank in mine.missing for found in by_rank.get(rank, ())):
                if mine.rank not in theirs.missing or mine.operation == theirs.operation:
                    continue
                patience = _DEADLOCK
                if mine.communicator == theirs.communicator:
                    patience = 0.0 if mine.number == theirs.number else _DEADLOCK_IN_ONE
                if now - max(mine.blocked_since, theirs.blocked_since) >= patience:
                    self._judged.add(key)
                    text = (
                        f"rank {mine.rank} waits for rank {theirs.rank} in {mine.what}, while rank {theirs.rank} waits "
                        f"for rank {mine.rank} in {theirs.what}. The ranks took different paths through the program: "
                        "different numbers of steps, or a condition that is true on some ranks only."
                    )
                    verdict = {"rank": mine.rank, "number": key[1], "communicator": mine.communicator, "text": text}
                    # A rank that holds the GIL may not have told yet that what it waited for has come: only it knows.
                    self._channel.tell(theirs.rank, "do you wait", {"number": number, "verdict": verdict})
                    break

    def _note_confirmed(self, sender: int, body: Body) -> None:
        """The other rank does wait, so the first one waits in vain."""
        verdict = body["verdict"]
        key = verdict["rank"], verdict["number"]
        if body["waits"]:
            self._channel.tell(verdict["rank"], "in vain", verdict)
        else:
            self._judged.discard(key)

    # Stalls ---------------------------------------------------------------------------------------

    def _ask(self, stalled: Sequence[Waiting], now: float) -> None:
        """Ask the ranks that are waited for what they are doing, those first that wait for nobody."""
        waiting = {wait.rank for wait in stalled}
        missing = {rank for wait in stalled for rank in wait.missing}
        asked = sorted(missing - waiting) or sorted(missing)
        self._questions += 1
        self._inquiry = _Inquiry(self._questions, tuple(asked[:_ASKED]), {}, {}, now + _ANSWER, now + 2 * _ANSWER)
        for rank in self._inquiry.asked:
            self._channel.tell(rank, "where are you", {"question": self._questions})
            self._look_at(rank)

    def _look_at(self, rank: int) -> None:
        """Let a rank of the same host look at one that may not answer."""
        peer = self._roster[rank]
        mates = [r for r, p in enumerate(self._roster) if p.domain == peer.domain and r != rank]
        for mate in mates[:2]:
            self._channel.tell(mate, "look at", {"question": self._questions, "rank": rank, "pid": peer.pid})

    def _note_account(self, sender: int, body: Body) -> None:
        if self._inquiry is not None and body["question"] == self._inquiry.number:
            self._inquiry.accounts[sender] = body

    def _note_seen(self, sender: int, body: Body) -> None:
        if self._inquiry is not None and body["question"] == self._inquiry.number:
            self._inquiry.seen[body["rank"]] = body

    def _pursue(self, inquiry: _Inquiry, stalled: Sequence[Waiting], now: float) -> None:
        silent = [rank for rank in inquiry.asked if rank not in inquiry.accounts]
        if silent and now < inquiry.answers_until:
            return
        if any(rank not in inquiry.seen for rank in silent) and now < inquiry.looks_until:
            return
        self._inquiry = None
        absent = {rank: Absent(inquiry.accounts.get(rank), inquiry.seen.get(rank)) for rank in inquiry.asked}
        self._say(report(stalled, absent, self._roster, steps.count, now, self._pause))
        self._reported, self._next_report = True, now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if self._abort and now - min(wait.since for wait in stalled) >= self._abort and not self._aborted:
            self._aborted = True
            self._end(stalled, inquiry.asked)

    def _end(self, stalled: Sequence[Waiting], missing: Sequence[int]) -> None:
        first = min(stalled, key=lambda wait: wait.since)
        culprits = missing or [first.rank]
        text = (
            f"{(culprits)} did not {'come to' if missing else 'finish'} {first.operation} within "
            f"RING_STALL_ABORT={self._abort:g} seconds; the report on rank 0 says what was going on there."
        )
        self._channel.tell(0, "failed", {"rank": culprits[0], "text": text, "of": -1, "lost": True})


#: Seconds from which a wait is worth telling rank 0: ranks in step wait for less.
_WORTH_TELLING = 1.5


class _Told(NamedTuple):
    """What rank 0 knows of a wait."""

    number: int
    since: float
    missing: tuple[int, ...]
    is_blocked: bool


class StallWatch:
    """A service of the guard: tells rank 0 about waits that last, and answers its questions.

    Args:
        channel: to rank 0.
        failure_detector: told of deadlocks that rank 0 finds.
        activities: what this rank did last with each communicator.
    """

    def __init__(
        self, channel: Channel, failure_detector: FailureDetector, activities: Callable[[], Iterable[Activity]]
    ) -> None:
        self._channel, self._failure_detector, self._activities = channel, failure_detector, activities
        self._told: dict[Hashable, _Told] = {}  # by the keys of `long_waits`
        self._numbers = itertools.count()
        channel.on("where are you", self._answer)
        channel.on("look at", self._look)
        channel.on("do you wait", self._confirm)
        channel.on("in vain", self._in_vain)

    def tick(self, now: float) -> None:
        waits = dict(long_waits)
        for key, told in list(self._told.items()):
            if key not in waits or waits[key].since != told.since:
                del self._told[key]
                self._channel.tell(0, "came", {"number": told.number})
        for key, wait in waits.items():
            if now - wait.since < _WORTH_TELLING:
                continue
            is_blocked = now - wait.blocked_since > 1.0
            before = self._told.get(key)
            number = before.number if before is not None else next(self._numbers)
            told = _Told(number, wait.since, wait.missing, is_blocked)
            if told != before:
                self._told[key] = told
                self._channel.tell(0, "waiting", {"number": number, **_described(wait, now, is_blocked)})

    def close(self) -> None:
        pass

    def _answer(self, sender: int, body: Body) -> None:
        self._channel.tell(sender, "here", {"question": body["question"], **own_account(self._activities())})

    def _look(self, sender: int, body: Body) -> None:
        """Look at another process of this host, which does not answer."""
        found = kernel_account(int(body["pid"]))
        self._channel.tell(sender, "seen", {"question": body["question"], "rank": body["rank"], **found})

    def _confirm(self, sender: int, body: Body) -> None:
        self._channel.tell(sender, "i wait", {"waits": self._waits_still(body["number"]), "verdict": body["verdict"]})

    def _in_vain(self, sender: int, body: Body) -> None:
        if self._waits_still(body["number"]):
            self._failure_detector.verdicts[body["communicator"]] = body["text"]

    def _waits_still(self, number: int) -> bool:
        """Whether the wait that rank 0 knows by this number has not ended meanwhile."""
        waits = dict(long_waits)
        return any(
            told.number == number and key in waits and waits[key].since == told.since
            for key, told in self._told.items()
        )


def _described(wait: LongWait, now: float, is_blocked: bool) -> Body:
    return {
        "communicator": wait.communicator,
        "what": wait.what,
        "number_of_operation": wait.number,
        "part_of": wait.part_of,
        "missing": wait.missing,
        "on_gpu": wait.on_gpu,
        "seconds": now - wait.since,
        "blocked": now - wait.blocked_since if is_blocked else 0.0,
        "clock": time.strftime("%H:%M:%S", time.localtime(time.time() - (now - wait.since))),
    }
