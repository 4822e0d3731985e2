"""Every rank's steps, brought together on rank 0.

One line during training, where much of a step is lost to communication.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ring_plugins.core.control.channel import Body, Channel
from ring_plugins.core.control.failure_detector import Peer
from ring_plugins.core.trace.steps import StepClock

#: Steps that are not looked at, since much happens in them for the first time, and those that are.
_WARM_UP, _STEPS = 10, 100
#: The share of a step that is worth a line, and the one that the advice leads to.
_MUCH, _LITTLE = 0.2, 0.1


class Advice:
    """Looks at a job's first steps, and says at most one line.

    Args:
        roster: where the ranks are.
        say: prints.
    """

    def __init__(self, membership: Sequence[Peer], say: Callable[[str], None]) -> None:
        self._roster, self._say = membership, say
        self._before: Balance | None = None
        self._given = False

    def look(self, total: Balance) -> None:
        """Some more steps are known."""
        if self._given or total.steps < _WARM_UP:
            return
        if self._before is None:
            self._before = total
        elif total.steps - self._before.steps >= _STEPS:
            self._given = True
            text = advice(total - self._before, self._roster)
            if text:
                self._say(text)


def advice(balance: Balance, membership: Sequence[Peer]) -> str:
    """What to say of these steps, "" for nothing."""
    computing, waiting, moving = balance.mean
    step = computing + waiting + moving
    last = f"in the last {balance.steps} steps"
    if moving > _MUCH * step:
        # moving / f is a tenth of the step that is left with it, whether moving shrinks f-fold or the rest grows.
        factor = (1 - _LITTLE) / _LITTLE * moving / (step - moving)
        between_hosts = len({peer.domain for peer in membership}) > 1
        batch = f"batch {factor:.1f} times as large on each rank"
        means = f"A network {factor:.1f} times as fast, or a {batch}," if between_hosts else f"A {batch}"
        return (
            f"{last} {moving / step:.0%} of the time ({_ms(moving)} of {_ms(step)} a step) went into moving "
            f"{balance.nbytes / 1e6:.3g} MB of gradients that backward did not hide. {means} would bring that to about "
            f"{_LITTLE:.0%}."
        )
    if waiting > _MUCH * step:
        rank = int(balance.slowest.argmax())
        return (
            f"{last} {waiting / step:.0%} of the time ({_ms(waiting)} of {_ms(step)} a step) "
            f"went into waiting for the slowest rank. That was rank {rank} on {membership[rank].host} in "
            f"{balance.slowest[rank] / balance.steps:.0%} of them."
        )
    return ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


Array = np.ndarray[Any, np.dtype[np.float64]]

#: Jobs of more ranks than this report every other step, or fewer, so that rank 0's work stays the same.
_RANKS_WITH_ALL_STEPS = 64
#: Steps that wait on rank 0 for the reports of other ranks, and steps counted together.
_PENDING, _TOGETHER = 2000, 50


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
        self._next_time = 0.0
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
        found = [step for step in self._steps.take() if step.number % self._stride == 0]
        if found:
            rows = [
                (step.number, round(step.computing * 1e6), round(step.waiting * 1e6), round(step.moving * 1e6))
                for step in found
            ]
            self._channel.tell(0, "steps", {"rows": rows, "nbytes": found[-1].nbytes}, droppable=True)

    def close(self) -> None:
        self._hurry.set()
        self.tick(time.monotonic())


class BalanceAggregator:
    """A service of rank 0's guard: knows the steps that all ranks have reported.

    Args:
        channel: to all ranks.
        on_steps: called with the balance of all steps so far whenever there are some more.
    """

    def __init__(self, channel: Channel, on_steps: Callable[[Balance], None]) -> None:
        self._on_steps = on_steps
        self._rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(channel.size)]
        self._nbytes = 0
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
        rows = self._rows[sender]
        rows.extend(body["rows"])
        del rows[:-_PENDING]
        self._nbytes = body["nbytes"]

    def tick(self, now: float) -> None:
        while (length := min(map(len, self._rows))) > 0:
            self._count(min(length, _TOGETHER))

    def _count(self, length: int) -> None:
        """Count the first steps of all ranks, as far as they are the same ones."""
        table = np.array([rows[:length] for rows in self._rows])  # rank, step, number and three times
        numbers = table[:, :, 0]
        equal = (numbers == numbers[0]).all(axis=0)
        length = length if equal.all() else int(equal.argmin())
        if length == 0:  # a report was lost, or too long in coming: go on where all have one again
            first = int(numbers[:, 0].max())
            for rows in self._rows:
                while rows and rows[0][0] < first:
                    del rows[0]
            return
        for rows in self._rows:
            del rows[:length]
        times = table[:, :length, 1:] * 1e-6
        slowest = np.bincount(times[:, :, 1].argmin(axis=0), minlength=len(self._rows))
        total = self._total
        self._total = Balance(
            total.steps + length, total.seconds + times.sum(axis=1), total.slowest + slowest, float(self._nbytes)
        )
        self._last = int(numbers[0, length - 1])
        self._on_steps(self._total)

    def close(self) -> None:
        pass
