"""How some ranks of a job meet without the others: each tells rank 0, which tells all of them once the last has come.

Rank 0's channel does that, not its script: rank 0 need not be one of them, and may be anywhere in its program. So the
members of disjoint groups meet at once, in whatever order their scripts come there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ring_plugins.core.base.errors import PeerLeft, RingError
from ring_plugins.core.control.channel import Body, Channel
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.wait import REASON, Wait

#: For what they meet, and the members. Threads of a rank may meet the same members for different things in any order.
_Purpose = tuple[str, tuple[int, ...]]
#: And how many meetings of these for that have been before.
_Key = tuple[str, tuple[int, ...], int]


def over_rank_0(
    channel: Channel, ranks: Callable[[], Sequence[int]], what: str, advice: str
) -> Callable[[], Sequence[int]]:
    """`ranks`, for a `Wait` whose messages go over rank 0: raises PeerLeft once that cannot be reached any more.

    Raises:
        RingError: this process was forked from a rank.
    """
    if channel.is_abandoned:
        raise RingError(
            f"this process was forked from rank {channel.rank} (a data loader's worker?), and cannot {what}: that is "
            "for the ranks themselves."
        )
    cut_off_since = 0.0

    def missing() -> Sequence[int]:
        nonlocal cut_off_since
        if channel.reaches(0):
            cut_off_since = 0.0
            return ranks()
        cut_off_since = cut_off_since or time.monotonic()
        if time.monotonic() - cut_off_since > REASON:  # in which its own reason would have arrived
            raise PeerLeft(
                f"rank {channel.rank} cannot {what}: ranks meet over rank 0, which has left the job or cannot be "
                f"reached. {advice}",
                0,
            )
        return ranks()

    return missing


class Meetings:
    """The meetings of a job that ends with its first lost rank.

    Args:
        channel: over rank 0.
        failure_detector: watches the other ranks.
    """

    def __init__(self, channel: Channel, failure_detector: FailureDetector) -> None:
        self._channel, self._failure_detector = channel, failure_detector
        self._before = Counter[_Purpose]()
        self._arrived: dict[_Key, dict[int, Any]] = {}  # on rank 0: the items of those that have come
        self._over: dict[_Key, list[Any]] = {}
        channel.on("meets", self._note_arrival, at_once=True)
        channel.on("have met", self._note_end, at_once=True)

    def gather(self, name: str, ranks: Sequence[int], item: Any) -> list[Any]:
        """The items of some ranks, in the order of `ranks`; these call it, and nobody else needs to.

        Args:
            name: for what they meet, equal on all.
            ranks: world ranks of all that do, in an order that is equal on all; this rank is among them.
            item: what JSON can hold.

        Raises:
            PeerFailed: one of them is gone, or rank 0 cannot be reached.
            RingError: this process was forked from a rank.
        """
        others = [rank for rank in ranks if rank != self._channel.rank]
        advice = "Make groups at the start, and let rank 0 stay until all have theirs."
        missing = over_rank_0(self._channel, lambda: others, f"make {name}", advice)
        key = name, tuple(ranks), self._before[name, tuple(ranks)]
        self._before[name, key[1]] += 1
        self._channel.tell(0, "meets", {"name": name, "ranks": list(ranks), "number": key[2], "item": item})
        wait = Wait(f"{name}, meeting {key[2] + 1}", self._failure_detector)
        wait.until(lambda: key in self._over, missing, lambda: f"the construction of {name}", arrival=True)
        return self._over.pop(key)

    def _note_arrival(self, sender: int, body: Body) -> None:
        name, ranks, number = key = _key(body)
        if sender not in ranks:
            raise ValueError(f"rank {sender} is not one of these")
        arrived = self._arrived.setdefault(key, {})
        arrived[sender] = body["item"]
        if len(arrived) == len(ranks):
            del self._arrived[key]
            items = [arrived[rank] for rank in ranks]
            told = {"name": name, "ranks": list(ranks), "number": number, "items": items}
            for rank in ranks:
                self._channel.tell(rank, "have met", told)

    def _note_end(self, sender: int, body: Body) -> None:
        self._over[_key(body)] = list(body["items"])


def _key(body: Body) -> _Key:
    return str(body["name"]), tuple(body["ranks"]), int(body["number"])
