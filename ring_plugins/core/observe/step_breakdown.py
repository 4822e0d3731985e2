"""Where the time of all ranks' steps goes, collected on rank 0.

Each rank splits its steps into computing, waiting for the slowest rank and moving bytes (`core.trace.steps`) and sends
them about once a second. Rank 0 adds up the steps that all ranks have reported, and warns once if much time is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ring_plugins.core.base.member import Members
from ring_plugins.core.control.channel import Body, Channel
from ring_plugins.core.trace.steps import StepClock

#: Jobs of more ranks than this report every other step, or fewer, so that rank 0's work stays the same.
_RANKS_WITH_ALL_STEPS = 64
#: Steps of a rank that rank 0 keeps while other ranks' reports are missing, and steps that it adds up at a time.
_PENDING, _AT_ONCE = 2000, 50
#: The warning skips the first steps, in which much happens for the first time, and looks at those after them.
_WARM_UP, _STEPS = 10, 100
#: The share of a step whose loss is worth a warning, and the share that the advice reduces it to.
_MUCH, _LITTLE = 0.2, 0.1


class StepBreakdown(NamedTuple):
    """Where the time of a number of steps went.

    Attributes:
        steps: their number.
        seconds: float64 [ranks, 3]: computing, waiting for the slowest and moving bytes, in total.
        slowest: int64 [ranks]: in how many of the steps this rank came last, that is, waited least.
        nbytes: bytes of gradients in a step.
    """

    steps: int
    seconds: np.ndarray[Any, np.dtype[np.float64]]
    slowest: np.ndarray[Any, np.dtype[np.int64]]
    nbytes: float

    def __sub__(self, earlier: StepBreakdown) -> StepBreakdown:
        return StepBreakdown(
            self.steps - earlier.steps, self.seconds - earlier.seconds, self.slowest - earlier.slowest, self.nbytes
        )

    @classmethod
    def empty(cls, ranks: int) -> StepBreakdown:
        """The breakdown of no steps."""
        return cls(0, np.zeros((ranks, 3)), np.zeros(ranks, np.int64), 0.0)

    @property
    def mean(self) -> tuple[float, float, float]:
        """Seconds of computing, waiting and moving in a step, averaged over the ranks."""
        computing, waiting, moving = (self.seconds.mean(axis=0) / max(1, self.steps)).tolist()
        return computing, waiting, moving


def report_interval(ranks: int) -> int:
    """The interval, in steps, at which each rank of a job of this size reports a step."""
    return -(-ranks // _RANKS_WITH_ALL_STEPS)


class StepReporter:
    """A service of every rank's monitor thread: sends the rank's steps to rank 0 every second or so.

    Args:
        channel: to rank 0.
        steps: those of this process.
    """

    def __init__(self, channel: Channel, steps: StepClock) -> None:
        self._channel, self._steps = channel, steps
        self._interval = report_interval(channel.size)
        self._period = max(1.0, channel.size / 50)
        self._next_time = 0.0
        self._must_flush = threading.Event()

    def flush(self) -> None:
        """Send the steps so far soon; called by other threads."""
        self._must_flush.set()
        self._channel.wake()

    def tick(self, now: float) -> None:
        if now < self._next_time and not self._must_flush.is_set():
            return
        self._must_flush.clear()
        self._next_time = now + self._period
        found = [step for step in self._steps.take() if step.number % self._interval == 0]
        if found:
            rows = [
                (step.number, round(step.computing * 1e6), round(step.waiting * 1e6), round(step.moving * 1e6))
                for step in found
            ]
            body = {"rows": rows, "nbytes": found[-1].nbytes, "on_gpu": self._steps.on_gpu}
            self._channel.tell(0, "report_steps", body, droppable=True)

    def close(self) -> None:
        self._must_flush.set()
        self.tick(time.monotonic())


class StepAggregator:
    """A service of rank 0's monitor thread: adds up the steps that all ranks have reported.

    Args:
        channel: to all ranks.
        members: of the job.
        warn: prints advice, once, if much time is lost.

    Attributes:
        total: the breakdown of all steps so far.
        last: number of the last step that all ranks have reported, -1 for none.
    """

    def __init__(self, channel: Channel, members: Members, warn: Callable[[str], None]) -> None:
        self.total = StepBreakdown.empty(channel.size)
        self.last = -1
        self._members, self._warn = members, warn
        self._rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(channel.size)]
        self._nbytes = 0
        self._on_gpu = [False] * channel.size
        self._before_advice: StepBreakdown | None = None
        self._has_advised = False
        channel.on("report_steps", self._note, droppable=True)

    def _note(self, sender: int, body: Body) -> None:
        rows = self._rows[sender]
        rows.extend(body["rows"])
        del rows[:-_PENDING]
        self._nbytes = body["nbytes"]
        self._on_gpu[sender] = bool(body.get("on_gpu"))

    def tick(self, now: float) -> None:
        while (length := min(map(len, self._rows))) > 0:
            self._add(min(length, _AT_ONCE))

    def close(self) -> None:
        pass

    def _add(self, length: int) -> None:
        """Add the first steps of all ranks, up to the first whose numbers differ among ranks."""
        table = np.array([rows[:length] for rows in self._rows])  # rank, step, number and three times
        numbers = table[:, :, 0]
        equal = (numbers == numbers[0]).all(axis=0)
        length = length if equal.all() else int(equal.argmin())
        if length == 0:  # a report was lost or came too late: continue with the first step that all ranks may have
            first = int(numbers[:, 0].max())
            for rows in self._rows:
                while rows and rows[0][0] < first:
                    del rows[0]
            return
        for rows in self._rows:
            del rows[:length]
        times = table[:, :length, 1:] * 1e-6
        if all(self._on_gpu):  # the rank that comes last waits only while bytes move, the others for that rank, too
            moving = times[:, :, 2].min(axis=0)
            times[:, :, 1] += times[:, :, 2] - moving
            times[:, :, 2] = moving
        slowest = np.bincount(times[:, :, 1].argmin(axis=0), minlength=len(self._rows))
        total = self.total
        self.total = StepBreakdown(
            total.steps + length, total.seconds + times.sum(axis=1), total.slowest + slowest, float(self._nbytes)
        )
        self.last = int(numbers[0, length - 1])
        if self._has_advised or self.total.steps < _WARM_UP:
            return
        self._before_advice = self._before_advice or self.total
        if self.total.steps - self._before_advice.steps >= _STEPS:
            self._has_advised = True
            if text := advice(self.total - self._before_advice, self._members):
                self._warn(text)


def advice(breakdown: StepBreakdown, members: Members) -> str:
    """A warning about the largest loss of time in these steps, "" if they lost little."""
    computing, waiting, moving = breakdown.mean
    step = computing + waiting + moving
    last = f"in the last {breakdown.steps} steps"
    if moving > max(_MUCH * step, waiting):
        # moving / factor is a tenth of the step that then remains, whether moving shrinks or the rest grows.
        factor = (1 - _LITTLE) / _LITTLE * moving / (step - moving)
        between_hosts = members.are_on_several_hosts()
        batch = f"batch {factor:.1f} times as large on each rank"
        means = f"A network {factor:.1f} times as fast, or a {batch}," if between_hosts else f"A {batch}"
        return (
            f"{last} {moving / step:.0%} of the time ({_ms(moving)} of {_ms(step)} per step) was spent moving "
            f"{breakdown.nbytes / 1e6:.3g} MB of gradients that backward did not hide. {means} would bring that to "
            f"about {_LITTLE:.0%}."
        )
    if waiting > _MUCH * step:
        rank = int(breakdown.slowest.argmax())
        return (
            f"{last} {waiting / step:.0%} of the time ({_ms(waiting)} of {_ms(step)} per step) was spent waiting for "
            f"the slowest rank. That was rank {rank} on {members.known[rank].host} in "
            f"{breakdown.slowest[rank] / breakdown.steps:.0%} of them."
        )
    return ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
