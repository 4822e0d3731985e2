"""Looks after the communicators of a process on the monitor thread, so that no GPU waits for a rank that is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from math import inf

from ring_plugins.core.base.errors import PeerLeft
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.wait import LONG, LongWait, long_waits
from ring_plugins.core.gpu.executor import DeviceExecutor

#: Seconds after which a thread that waits inside NCCL for a member that has left is given up.
_STUCK = 10.0


class GpuWatchdog:
    """A service of the monitor thread: polls or aborts communicators, and publishes what the GPUs wait for.

    Args:
        failure_detector: knows what became of the other ranks.
        executors: returns those of this process.
    """

    def __init__(self, failure_detector: FailureDetector, executors: Callable[[], Sequence[DeviceExecutor]]) -> None:
        self._failure_detector, self._executors = failure_detector, executors
        self._published: set[Hashable] = set()

    def tick(self, now: float) -> None:
        executors = self._executors()
        failure = self._failure_detector.failure() if executors else None
        for executor in executors:
            if failure is None:
                departed = [rank for rank in executor.peers if self._failure_detector.has_ended(rank)]
                executor.poll(departed)
                self._check_queuing(executor, departed, now)
            else:
                executor.abort(failure)  # a kernel that waits for a dead peer would never end
        self._publish(executors)

    def _check_queuing(self, executor: DeviceExecutor, departed: Sequence[int], now: float) -> None:
        """End this process if a thread of it is stuck inside NCCL, where no exception reaches it.

        Raises:
            PeerLeft: it waits for a member that has left; ends the job, as what a vital service raises does.
        """
        since, what = executor.connection.queuing
        if since and departed and now - since > _STUCK:
            raise PeerLeft(
                f"rank {departed[0]} has left the job, but a thread of this rank is inside NCCL and waits for it in "
                f"{executor.name}: {what}. Usually the ranks took different numbers of steps: give every rank the same "
                "number of batches.",
                departed[0],
            )

    def _publish(self, executors: Sequence[DeviceExecutor]) -> None:
        """Put the first operation of each stream into `long_waits`; the others wait behind it."""
        first: dict[int, tuple[float, DeviceExecutor]] = {}
        for executor in executors:
            stream, oldest = executor.queue.stream, executor.queue.oldest
            if oldest is not None and oldest.queued_at < first.get(stream, (inf, executor))[0]:
                first[stream] = (oldest.queued_at, executor)
        found: dict[Hashable, LongWait | None] = {
            ("stream", stream): executor.queue.long_wait(executor.peers) for stream, (_, executor) in first.items()
        }
        for executor in executors:
            since, what = executor.connection.queuing
            if since and time.monotonic() - since > LONG:  # before there is anything for the GPU to wait in
                name, peers, number = executor.name, tuple(executor.peers), executor.statistics.operations
                found[name] = LongWait(name, f"{name}: {what} by NCCL", number, "", peers, since, since, on_gpu=True)
        waits = {key: wait for key, wait in found.items() if wait is not None}
        for key in self._published - waits.keys():
            long_waits.pop(key, None)
        long_waits.update(waits)
        self._published = set(waits)

    def close(self) -> None:
        self._publish([])
