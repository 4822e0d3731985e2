"""Where the time of a training step goes: computing, waiting for the slowest rank, moving bytes.

A step ends when all gradients of a pass are averaged, and the next begins there. While a thread of the script stands
still for a collective, the time until the last member has come is *waiting for the slowest*, and the time after that is
*moving bytes*. The communicators tell the two apart where they look whether everyone has arrived, so no clock is
compared with another host's. All the rest of the step counts as *computing*: forward, backward, the optimizer, and
loading data. What is moved behind backward, while the script computes, costs nothing and is not counted.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from ring_plugins.core.trace.recorder import recorder

#: Steps kept; at most a second's worth or so waits to be collected.
_KEPT = 4096


class Step(NamedTuple):
    """One step of one rank, in seconds.

    Attributes:
        number: from 0, equal on all ranks for the same step.
        computing: neither of the others.
        waiting: standing still until the slowest rank had come.
        moving: standing still while bytes moved.
        nbytes: of gradients.
    """

    number: int
    computing: float
    waiting: float
    moving: float
    nbytes: int


class StepClock:
    """Collects the steps of this process.

    Attributes:
        count: steps ended so far.
        waiting, moving: seconds in which the script stood still, in all.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything: a new job begins."""
        self.count = 0
        self.waiting = self.moving = 0.0
        self._ended = 0.0
        self._waiting_before = self._moving_before = 0.0
        self._steps: deque[Step] = deque(maxlen=_KEPT)

    def add_blocked_time(self, seconds: float, waiting: float) -> None:
        """The script stood still for a collective, `waiting` of the seconds until all members had come."""
        waiting = min(waiting, seconds)
        self.waiting += waiting
        self.moving += seconds - waiting

    def end_step(self, nbytes: int) -> None:
        """All gradients of a pass are averaged: `nbytes` of them."""
        now = time.monotonic()
        if self._ended:
            waiting, moving = self.waiting - self._waiting_before, self.moving - self._moving_before
            computing = max(0.0, now - self._ended - waiting - moving)
            self._steps.append(Step(self.count, computing, waiting, moving, nbytes))
            if recorder.on:
                recorder.record("step", f"step {self.count}", int(self._ended * 1e9), int(now * 1e9))
        self._ended, self._waiting_before, self._moving_before = now, self.waiting, self.moving
        self.count += 1

    def take(self) -> list[Step]:
        """The steps since the last call."""
        return [self._steps.popleft() for _ in range(len(self._steps))]


#: The one of this process.
steps = StepClock()
