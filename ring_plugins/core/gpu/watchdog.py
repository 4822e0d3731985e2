"""The GPU watchdog: sees to it that no GPU waits for a rank that is gone, even if the script makes no calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import inf

from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.wait import LongWait, long_waits
from ring_plugins.core.gpu.communicator import DeviceCommunicator


class GpuWatchdog:
    """A service of the monitor thread: polls or aborts communicators, and publishes what the GPUs wait for.

    Args:
        failure_detector: knows what became of the other ranks.
        communicators: returns those of this process.
    """

    def __init__(
        self, failure_detector: FailureDetector, communicators: Callable[[], Sequence[DeviceCommunicator]]
    ) -> None:
        self._failure_detector, self._communicators = failure_detector, communicators
        self._published: set[Hashable] = set()

    def tick(self, now: float) -> None:
        communicators = self._communicators()
        failure = self._failure_detector.failure() if communicators else None
        for communicator in communicators:
            if failure is None:
                communicator.poll([rank for rank in communicator.ranks if self._failure_detector.has_ended(rank)])
            else:
                communicator.abort(failure)  # a kernel that waits for a dead peer would never end
        self._publish(communicators)

    def _publish(self, communicators: Sequence[DeviceCommunicator]) -> None:
        """Put the first operation of each stream into `long_waits`; the others wait behind it."""
        first: dict[int, tuple[float, DeviceCommunicator]] = {}
        for communicator in communicators:
            oldest = communicator.oldest
            if oldest is not None and oldest.queued_at < first.get(communicator.stream, (inf, communicator))[0]:
                first[communicator.stream] = (oldest.queued_at, communicator)
        found: dict[Hashable, LongWait | None] = {
            ("stream", stream): communicator.long_wait() for stream, (_, communicator) in first.items()
        }
        waits = {key: wait for key, wait in found.items() if wait is not None}
        for key in self._published - waits.keys():
            long_waits.pop(key, None)
        long_waits.update(waits)
        self._published = set(waits)

    def close(self) -> None:
        self._publish([])
