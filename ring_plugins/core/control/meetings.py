"""How some ranks of a job meet without the others: each tells rank 0, which tells all of them once the last has come.

Rank 0's channel does that, not its script: rank 0 need not be one of them, and may be anywhere in its program. So the
members of disjoint groups meet at once, in whatever order their scripts come there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ring_plugins.core.base.errors import PeerLeft
from ring_plugins.core.control.channel import Body, Channel
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.wait import REASON, Wait

#: The members, and how many meetings of exactly these have been before.
_Key = tuple[tuple[int, ...], int]


class Meetings:
    """The meetings of a job that ends with its first lost rank.

    Args:
        channel: over rank 0.
        failure_detector: watches the other ranks.
    """

    def __init__(self, channel: Channel, failure_detector: FailureDetector) -> None:
        self._channel, self._failure_detector = channel, failure_detector
        self._before = Counter[tuple[int, ...]]()
        self._arrived: dict[_Key, dict[int, Any]] = {}  # on rank 0: the items of those that have come
        self._over: dict[_Key, list[Any]] = {}
        channel.on("meets", self._note_arrival, at_once=True)
        channel.on("have met", self._note_end, at_once=True)

    def gather(self, name: str, ranks: Sequence[int], item: Any) -> list[Any]:
        """The items of some ranks, in the order of `ranks`; these call it, and nobody else needs to.

        Args:
            name: for what they meet, for messages.
            ranks: world ranks of all that do, in an order that is equal on all; this rank is among them.
            item: what JSON can hold.

        Raises:
            PeerFailed: one of them is gone, or rank 0 cannot be reached.
        """
        key = tuple(ranks), self._before[tuple(ranks)]
        self._before[key[0]] += 1
        self._channel.tell(0, "meets", {"ranks": list(ranks), "number": key[1], "item": item})
        others = [rank for rank in ranks if rank != self._channel.rank]
        cut_off_since = 0.0

        def missing() -> Sequence[int]:
            nonlocal cut_off_since
            if self._channel.reaches(0):
                cut_off_since = 0.0
                return others
            cut_off_since = cut_off_since or time.monotonic()
            if time.monotonic() - cut_off_since > REASON:  # in which its own reason would have arrived
                raise PeerLeft(
                    f"rank {self._channel.rank} cannot make {name}: ranks meet over rank 0, which has left the job or "
                    "cannot be reached. Make groups at the start, and let rank 0 stay until all have theirs.",
                    0,
                )
            return others

        wait = Wait(f"{name}, meeting {key[1] + 1}", self._failure_detector)
        wait.until(lambda: key in self._over, missing, lambda: f"the construction of {name}", arrival=True)
        return self._over.pop(key)

    def _note_arrival(self, sender: int, body: Body) -> None:
        key = tuple(body["ranks"]), int(body["number"])
        if sender not in key[0]:
            raise ValueError(f"rank {sender} is not one of these")
        arrived = self._arrived.setdefault(key, {})
        arrived[sender] = body["item"]
        if len(arrived) == len(key[0]):
            del self._arrived[key]
            items = [arrived[rank] for rank in key[0]]
            for rank in key[0]:
                self._channel.tell(rank, "have met", {"ranks": list(key[0]), "number": key[1], "items": items})

    def _note_end(self, sender: int, body: Body) -> None:
        self._over[tuple(body["ranks"]), int(body["number"])] = list(body["items"])
