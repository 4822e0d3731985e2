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

from collections import deque
from typing import NamedTuple

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
        gpu_wait: seconds that the GPU waited for communication in the step that was timed last.
        ended: by step: when it ended, the four numbers above at that time, and the bytes that it reduced.
            `GradientReducer` appends this at the end of a pass, and counts.
        on_gpu: whether the GPU's waits are known, and count as moving.
        compression: the codec of the gradients that were averaged last, None for none.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything, for a new job."""
        self.count = 0
        self.waiting = self.moving = self.gpu_wait = 0.0
        self.ended: deque[tuple[float, int, float, float, float, int]] = deque(maxlen=_KEPT + 1)
        self.on_gpu = False
        self.compression: str | None = None
        self._timed_step = -1

    def add_blocked_time(self, seconds: float, waiting: float) -> None:
        """Count time in which a collective blocked the script, `waiting` of it until all members had arrived."""
        waiting = min(waiting, seconds)
        self.waiting += waiting
        self.moving += seconds - waiting

    def add_gpu_wait(self, step: int, seconds: float) -> None:
        """Count time of a step that was timed, in which the GPU had nothing to do but to wait for communication."""
        self.on_gpu = True
        if step != self._timed_step:
            self._timed_step, self.gpu_wait = step, 0.0
        self.gpu_wait += seconds

    def take(self) -> list[Step]:
        """The steps since the last call; not the first one of all, of which nobody knows when it began."""
        found = []
        while len(self.ended) > 1:
            began, _, waiting_before, moving_before, _, _ = self.ended.popleft()
            ended, number, waiting, moving, gpu_wait, nbytes = self.ended[0]
            waiting, moving = waiting - waiting_before, moving - moving_before
            moving += min(gpu_wait, max(0.0, ended - began - waiting - moving))
            found.append(Step(number, max(0.0, ended - began - waiting - moving), waiting, moving, nbytes))
        return found


#: The steps of this process.
steps = StepClock()
