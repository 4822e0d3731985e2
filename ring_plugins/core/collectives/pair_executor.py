"""The executor of a communicator of two, on whose thread the members meet before there is a communicator.

Messages between two ranks need it (torch/point_to_point.py): the first message connects them, in the background, since
the other end may come to it much later. Most scripts wait for a message as soon as they have started it. Handing it to
the thread and waking up again takes longer than a small message, so a caller that waits for the only one under way runs
it in its own thread, unless the executor's has begun. On two busy cores, the median round trip of 4 bytes took 330 to
470 us instead of 420 to 605.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ring_plugins.core.collectives.background import BackgroundWork
from ring_plugins.core.collectives.executor import Members, SerialExecutor
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.wait import Wait


class PairExecutor(SerialExecutor):
    """A `SerialExecutor` for two members that have to meet first.

    Args:
        name: of the communicator, for error texts.
        wait: waits for the other member; has no key yet.
        callers_run: whether a caller runs the only work under way itself.
    """

    def __init__(self, name: str, wait: Wait, callers_run: bool) -> None:
        super().__init__(name, wait)
        self._callers_run = callers_run

    def meet(
        self, have_come: Callable[[], bool], missing: Callable[[], Sequence[int]], nap: Callable[[float], None]
    ) -> None:
        """Wait, in a work of this executor, until the other member has come.

        Args:
            have_come, missing, nap: as for `Wait.until`.
        """
        work = self._thread.current if self._thread is not None else None
        what = f"{self._name}: {self._synchronous or (work.description if work is not None else '')}"
        self.wait.until(have_come, missing, lambda: what, arrival=True, nap=nap, spin=0.0)

    def connect(self, key: int, failure_detector: FailureDetector | None, members: Members) -> None:
        """Run the operations of a communicator from now on.

        Args:
            key, failure_detector: as for `Wait`.
            members: told when this member is interrupted.
        """
        self.members = members
        self.wait.renew(self._name, key, failure_detector)

    def finish(self, seconds: float) -> None:
        """Return when nothing is queued or under way, after `seconds` at the latest."""
        if self._thread is not None:
            self._thread.wait_until_idle(seconds)

    def _block_caller(self, work: BackgroundWork[Any]) -> None:
        if self._callers_run and self._thread is not None and self._thread.has_one_left():
            self.run_synchronously(work.description, work.run, at_once=True)
        super()._block_caller(work)
