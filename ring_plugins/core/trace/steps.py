"""Where the time of a training step goes: computing, waiting for the slowest rank, moving bytes.

A step lasts from one complete averaging of all gradients to the next. While the script is blocked by a collective, the
time until the last member has arrived counts as *waiting for the slowest*, and the time after that as *moving bytes*.
The communicators notice when everyone has arrived, so no clock is compared with another host's. The rest of the step
counts as *computing*: forward, backward, the optimizer, and loading data. Bytes that move while the script computes
cost nothing and are not counted.

A GPU waits for communication while its script goes on. One step of 50 is timed on the GPU (`core.gpu.stream`), and the
steps after it count as much blocked time. Events cannot tell waiting from moving on one rank, so it counts as moving
there; rank 0, which compares the ranks, can (`core.observe.step_breakdown`).
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from ring_plugins.core.trace.recorder import recorder

#: Steps kept until they are taken, which happens every second or so.
_KEPT = 4096


class Step(NamedTuple):
    """One step of one rank, in seconds.

    Attributes:
        number: from 0, equal on all ranks for the same step.
        computing: not blocked.
        waiting: blocked until the slowest rank had arrived.
        moving: blocked while bytes moved.
        nbytes: bytes of gradients.
    """

    number: int
    computing: float
    waiting: float
    moving: float
    nbytes: int


class StepClock:
    """Collects the steps of this process.

    Attributes:
        count: number of finished steps.
        waiting, moving: seconds in which the script was blocked, in total.
        on_gpu: whether the GPU's waits are known, and count as moving.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything, for a new job."""
        self.count = 0
        self.waiting = self.moving = 0.0
        self._ended = 0.0
        self._waiting_before = self._moving_before = 0.0
        self._steps: deque[Step] = deque(maxlen=_KEPT)
        self.on_gpu = False
        #: Number of the step that was timed last, and how long the GPU waited for communication in it.
        self._timed_step, self._gpu_wait = -1, 0.0

    def add_blocked_time(self, seconds: float, waiting: float) -> None:
        """Count time in which a collective blocked the script, `waiting` of it until all members had arrived."""
        waiting = min(waiting, seconds)
        self.waiting += waiting
        self.moving += seconds - waiting

    def add_gpu_wait(self, step: int, seconds: float) -> None:
        """Count time of a step that was timed, in which the GPU had nothing to do but to wait for communication."""
        self.on_gpu = True
        if step != self._timed_step:
            self._timed_step, self._gpu_wait = step, 0.0
        self._gpu_wait += seconds

    def end_step(self, nbytes: int) -> None:
        """End the step: all gradients of a pass, `nbytes` bytes, are averaged."""
        now = time.monotonic()
        if self._ended:
            waiting, moving = self.waiting - self._waiting_before, self.moving - self._moving_before
            moving += min(self._gpu_wait, max(0.0, now - self._ended - waiting - moving))
            computing = max(0.0, now - self._ended - waiting - moving)
            self._steps.append(Step(self.count, computing, waiting, moving, nbytes))
            if recorder.on:
                recorder.record("step", f"step {self.count}", int(self._ended * 1e9), int(now * 1e9))
        self._ended, self._waiting_before, self._moving_before = now, self.waiting, self.moving
        self.count += 1

    def take(self) -> list[Step]:
        """The steps since the last call."""
        return [self._steps.popleft() for _ in range(len(self._steps))]


#: The steps of this process.
steps = StepClock()
