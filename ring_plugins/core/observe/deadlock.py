"""Rank 0's half of deadlock detection: which scripts wait for each other, and the question whether that is final.

Rank 0 has a table of long waits (observe/stall.py). It looks there for ranks of which each waits for the next and the
last for the first. The table may be out of date, so rank 0 asks each of these ranks (`confirm_wait`): does your script
still sit in that wait, and have you neither begun nor queued the operation in which the rank before you waits? A rank
that says yes can begin that operation only after its own wait has ended. So if all say yes, at whatever moments, none
of the waits can have been the first to end, and none ever will. Only then rank 0 tells the ranks (`declare_deadlock`),
which look once more and raise.

Two ranks are told one by one, each after the other one's answer, since they may also be in different operations of one
communicator. Of three and more, all must have answered.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from math import inf

from ring_plugins.core.control.channel import Body, Channel
from ring_plugins.core.control.failure_detector import LAST_EXCHANGE, OF_EXCHANGES, OF_NAMES
from ring_plugins.core.observe.stall_report import Waiting

#: Seconds that ranks must wait for each other in different communicators before they are asked. Two ranks whose n-th
#: operations of one communicator differ are asked at once.
_DEADLOCK = 2.0
#: Seconds until they are asked again, if there was no deadlock.
_ASK_AGAIN = 2.0
#: Searches for a circle at a time.
_MOST_SEARCHES = 64

#: A rank, and its number of a wait.
Key = tuple[int, int]


class DeadlockFinder:
    """Finds ranks whose scripts wait for each other in different operations, on whatever hosts.

    Args:
        channel: to all ranks.
        waits: the long waits of all ranks, which the owner keeps up to date.
    """

    def __init__(self, channel: Channel, waits: dict[Key, Waiting]) -> None:
        self._channel, self._waits = channel, waits
        #: Waits that were asked about in pairs and in circles, and when they may be again.
        self._suspected: dict[Key, float] = {}
        self._in_circles: dict[Key, float] = {}
        self._numbers = itertools.count()
        #: By number, circles of three and more: what each rank is to be told, and who has not confirmed its wait.
        self._circles: dict[int, tuple[list[Body], set[int]]] = {}
        channel.on("answer_wait", self._note_answer)

    def tick(self, now: float) -> None:
        """Look at the waits, and ask ranks that seem to be in a deadlock."""
        for asked in (self._suspected, self._in_circles):
            for key in asked.keys() - self._waits.keys():
                del asked[key]
        blocked = {key: wait for key, wait in self._waits.items() if wait.blocked_since}
        if len(blocked) > 1:
            self._find_pairs(blocked, now)
            self._find_circles(blocked, now)

    def _find_pairs(self, blocked: dict[Key, Waiting], now: float) -> None:
        by_rank: dict[int, list[tuple[int, Waiting]]] = {}
        for (rank, number), wait in blocked.items():
            by_rank.setdefault(rank, []).append((number, wait))
        for key, mine in blocked.items():
            if self._suspected.get(key, 0.0) > now:
                continue
            for number, theirs in (found for rank in mine.missing for found in by_rank.get(rank, ())):
                if mine.rank not in theirs.missing:
                    continue
                is_one = mine.communicator == theirs.communicator
                if is_one and (mine.number != theirs.number or mine.operation == theirs.operation):
                    continue  # one of the two has sent its part, or both are in the same operation
                patience = 0.0 if is_one else _DEADLOCK
                if now - max(mine.blocked_since, theirs.blocked_since) >= patience:
                    self._suspected[key] = inf
                    deadlock = _deadlock(key[1], [mine, theirs])
                    if is_one:  # each has begun an operation of this number, but not the other's
                        del deadlock["needs"], deadlock["awaited"]
                    self._channel.tell(theirs.rank, "confirm_wait", {"number": number, "deadlock": deadlock})
                    break

    def _find_circles(self, blocked: dict[Key, Waiting], now: float) -> None:
        by_rank: dict[int, list[Key]] = {}
        for key in blocked:
            by_rank.setdefault(key[0], []).append(key)
        # Of a rank that waits in several threads, one may go on and begin what others wait in.
        lone = {
            rank: keys[0]
            for rank, keys in by_rank.items()
            if len(keys) == 1
            and self._in_circles.get(keys[0], 0.0) <= now
            and not blocked[keys[0]].on_gpu
            and now - blocked[keys[0]].blocked_since >= _DEADLOCK
        }
        for circle in _circles({rank: blocked[key].missing for rank, key in lone.items()}):
            keys = [lone[rank] for rank in circle]
            waits = [blocked[key] for key in keys]
            number = next(self._numbers)
            told = []
            for place, key in enumerate(keys):
                self._in_circles[key] = inf
                deadlock = {**_deadlock(key[1], waits[place:] + waits[:place]), "circle": number}
                told.append(deadlock)
                after = keys[(place + 1) % len(keys)]
                self._channel.tell(after[0], "confirm_wait", {"number": after[1], "deadlock": deadlock})
            self._circles[number] = told, set(circle)

    def _note_answer(self, sender: int, body: Body) -> None:
        deadlock = body["deadlock"]
        if "circle" in deadlock:
            self._note_answer_of_circle(sender, deadlock["circle"], body["waits"])
        elif body["waits"]:
            self._channel.tell(deadlock["rank"], "declare_deadlock", deadlock)
        else:
            self._suspected[deadlock["rank"], deadlock["number"]] = time.monotonic() + _ASK_AGAIN

    def _note_answer_of_circle(self, sender: int, number: int, waits: bool) -> None:
        if number not in self._circles:
            return
        told, silent = self._circles[number]
        if not waits:
            del self._circles[number]
            until = time.monotonic() + _ASK_AGAIN
            self._in_circles.update(((deadlock["rank"], deadlock["number"]), until) for deadlock in told)
            return
        silent.discard(sender)
        if not silent:
            del self._circles[number]
            for deadlock in told:
                self._channel.tell(deadlock["rank"], "declare_deadlock", deadlock)


def _circles(missing: dict[int, Sequence[int]]) -> list[list[int]]:
    """Shortest circles of three and more ranks that have no rank in common; `missing` says for whom each rank waits.

    A circle that shares a rank with another is found once that one is resolved: its ranks have raised by then.
    """
    ahead = {rank: {other for other in others if other in missing} for rank, others in missing.items()}
    found: list[list[int]] = []
    while _without_ends(ahead):
        searches = ((rank, last) for rank in sorted(ahead) for last in sorted(ahead) if rank in ahead[last])
        # Beyond some searches, there are only pairs, which wait for each other in very many ways.
        paths = (_path(ahead, rank, last) for rank, last in itertools.islice(searches, _MOST_SEARCHES))
        circle = next(filter(None, paths), None)
        if circle is None:
            break
        found.append(circle)
        for rank in circle:
            del ahead[rank]
    return found


def _without_ends(ahead: dict[int, set[int]]) -> bool:
    """Remove ranks that wait for nobody, or for whom nobody waits, until none is left; whether others are."""
    behind: dict[int, set[int]] = {rank: set() for rank in ahead}
    for rank, others in ahead.items():
        others.intersection_update(behind)
        for other in others:
            behind[other].add(rank)
    ends = [rank for rank in ahead if not ahead[rank] or not behind[rank]]
    while ends:
        end = ends.pop()
        for here, there in ((ahead, behind), (behind, ahead)):
            for other in here.pop(end, ()):
                there[other].discard(end)
                if not there[other]:
                    ends.append(other)
    return bool(ahead)


def _path(ahead: dict[int, set[int]], first: int, last: int) -> list[int] | None:
    """The shortest way from one rank to another with at least one between them, None if there is none."""
    before = {first: first}
    reached = [first]
    for rank in reached:  # which grows: breadth first
        for other in sorted(ahead[rank] - before.keys()):
            if (rank, other) == (first, last):
                continue
            before[other] = rank
            reached.append(other)
            if other == last:
                path = [last]
                while path[-1] != first:
                    path.append(before[path[-1]])
                return path[::-1]
    return None


def _deadlock(number: int, circle: Sequence[Waiting]) -> Body:
    """What is asked and told about a deadlock.

    Args:
        number: that of the first rank's wait.
        circle: waits of which each is for the rank of the next one, and the last for the first.
    """
    mine, last = circle[0], circle[-1]
    described = [_described(wait, circle[(place + 1) % len(circle)]) for place, wait in enumerate(circle)]
    cause = " ".join(f"On rank {wait.rank}, {wait.hindrances}" for wait in circle if wait.hindrances) or (
        "Names match in any order, but a script that waits for one operation cannot call the next: call them in one "
        "order on all ranks, or begin all (in PyTorch, with *_async) before waiting."
        if all(wait.communicator.startswith(OF_NAMES) for wait in circle)
        else LAST_EXCHANGE
        if any(wait.communicator.startswith(OF_EXCHANGES) for wait in circle)
        else "The ranks took different paths through the program: different numbers of steps, or a condition that is "
        "true on some ranks only."
    )
    return {
        "rank": mine.rank,
        "number": number,
        "communicator": mine.communicator,
        "text": f"{', '.join(described[:-1])}, while {described[-1]}. {cause}",
        # The operation that the next rank must not have begun, and the one that this rank must not have begun.
        "needs": (mine.communicator, mine.number, mine.rank),
        "awaited": (last.communicator, last.number, last.rank),
    }


def _described(waiting: Waiting, other: Waiting) -> str:
    part = f" (part of {waiting.part_of})" if waiting.part_of else ""
    if waiting.operation == other.operation:  # of two communicators with one name
        part += f" in {waiting.communicator}"
    return f"rank {waiting.rank} waits for rank {other.rank} in {waiting.what}{part}"
