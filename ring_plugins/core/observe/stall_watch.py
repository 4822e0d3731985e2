"""Every rank's part in stall reports: it says what it waits for, and what it is doing when asked."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from ring_plugins.core.collectives.ordered import Activity
from ring_plugins.core.control.channel import Body, Channel
from ring_plugins.core.failure import Watch
from ring_plugins.core.observe.whereabouts import kernel_account, own_account
from ring_plugins.core.waiting import LongWait, long_waits

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
        watch: told of deadlocks that rank 0 finds.
        activities: what this rank did last with each communicator.
    """

    def __init__(self, channel: Channel, watch: Watch, activities: Callable[[], Iterable[Activity]]) -> None:
        self._channel, self._watch, self._activities = channel, watch, activities
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
            self._watch.verdicts[body["communicator"]] = body["text"]

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
