"""Every rank's steps, brought together on rank 0."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ring_plugins.core.control.channel import Body, Channel
from ring_plugins.core.observe.steps import StepClock

Array = np.ndarray[Any, np.dtype[np.float64]]

#: Jobs of more ranks than this report every other step, or fewer, so that rank 0's work stays the same.
_RANKS_WITH_ALL_STEPS = 64
#: Steps that wait on rank 0 for the reports of other ranks.
_PENDING = 2000


class Balance(NamedTuple):
    """Where the time of a number of steps went.

    Attributes:
        steps: how many were counted.
        seconds: float64 [ranks, 3]: computing, waiting for the slowest and moving bytes, in all.
        slowest: int64 [ranks]: in how many of the steps this rank came last, which is to say waited least.
        nbytes: of gradients a step.
    """

    steps: int
    seconds: Array
    slowest: np.ndarray[Any, np.dtype[np.int64]]
    nbytes: float

    def __sub__(self, earlier: Balance) -> Balance:
        return Balance(
            self.steps - earlier.steps, self.seconds - earlier.seconds, self.slowest - earlier.slowest, self.nbytes
        )

    @classmethod
    def none(cls, ranks: int) -> Balance:
        """Of no steps."""
        return cls(0, np.zeros((ranks, 3)), np.zeros(ranks, np.int64), 0.0)

    @property
    def mean(self) -> tuple[float, float, float]:
        """Seconds of computing, waiting and moving a step, averaged over the ranks."""
        computing, waiting, moving = (self.seconds.mean(axis=0) / max(1, self.steps)).tolist()
        return computing, waiting, moving


def stride(ranks: int) -> int:
    """Every how many-th step is reported."""
    return -(-ranks // _RANKS_WITH_ALL_STEPS)


class StepReports:
    """A service of every rank's guard: sends the steps to rank 0, every second or so.

    Args:
        channel: to rank 0.
        steps: those of this process.
    """

    def __init__(self, channel: Channel, steps: StepClock) -> None:
        self._channel, self._steps = channel, steps
        self._stride = stride(channel.size)
        self._period = max(1.0, channel.size / 50)
        self._next_number, self._next_time = 0, 0.0
        self._hurry = threading.Event()

    def hurry(self) -> None:
        """Send what there is now; called by other threads."""
        self._hurry.set()
        self._channel.flush(0)

    def tick(self, now: float) -> None:
        if now < self._next_time and not self._hurry.is_set():
            return
        self._hurry.clear()
        self._next_time = now + self._period
        found = [step for step in self._steps.since(self._next_number) if step.number % self._stride == 0]
        if found:
            self._next_number = found[-1].number + 1
            rows = [
                [step.number, round(step.computing * 1e6), round(step.waiting * 1e6), round(step.moving * 1e6)]
                for step in found
            ]
            self._channel.tell(0, "steps", {"rows": rows, "nbytes": found[-1].nbytes}, droppable=True)

    def close(self) -> None:
        self._hurry.set()
        self.tick(time.monotonic())


class BalanceDesk:
    """A service of rank 0's guard: knows the steps that all ranks have reported.

    Args:
        channel: to all ranks.
        on_step: called with the balance of all steps so far, once a step.
    """

    def __init__(self, channel: Channel, on_step: Callable[[Balance], None]) -> None:
        self._ranks, self._on_step = channel.size, on_step
        self._pending: OrderedDict[int, tuple[Array, set[int]]] = OrderedDict()
        self._total = Balance.none(channel.size)
        self._last = -1
        channel.on("steps", self._note)

    @property
    def total(self) -> Balance:
        """Of all steps so far."""
        return self._total

    @property
    def last(self) -> int:
        """Number of the last step that all ranks have reported, -1 for none."""
        return self._last

    def _note(self, sender: int, body: Body) -> None:
        for number, *microseconds in body["rows"]:
            if number not in self._pending:
                self._pending[number] = np.zeros((self._ranks, 3)), set()
            seconds, reported = self._pending[number]
            seconds[sender] = microseconds
            reported.add(sender)
            if len(reported) == self._ranks:
                del self._pending[number]
                self._count(number, seconds * 1e-6, body["nbytes"])
        while len(self._pending) > _PENDING:
            self._pending.popitem(last=False)

    def _count(self, number: int, seconds: Array, nbytes: int) -> None:
        total, slowest = self._total, self._total.slowest.copy()
        slowest[int(seconds[:, 1].argmin())] += 1
        self._total = Balance(total.steps + 1, total.seconds + seconds, slowest, float(nbytes))
        self._last = max(self._last, number)
        self._on_step(self._total)

    def tick(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass
