"""A thread of every rank that watches the job while the script computes.

A script that waits in a collective learns of a failure there. A script that computes, loads data or waits in another
library does not, and would go on for hours in a job that is over, or hang. So this thread handles messages,
runs the services (stall reports, timelines, failure detection that polls), and when a peer has failed gives the script
some seconds to notice in its next collective. Then it ends the process.

It also ends the process when the launcher is gone: an mpirun killed by SIGKILL does not end its ranks. Where rank 0 has
spawned the others, the kernel ends them with rank 0, and nobody would say why the job is over. So rank 1 lives for a
moment longer, and its monitor thread tells.

A service that only observes is dropped with a message if it raises: it must not harm the job. Any other exception ends
the job (core/base/threads.py), since without this thread nobody would notice a failure.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.linux.process import end_with_parent, outlive_parent

#: Seconds between ticks.
_EVERY = 0.5
#: Seconds that a script has to notice a failed peer before its process is ended.
_GRACE = 5.0
#: Seconds for the launcher to end the job; where MPI is broken too, the call may never return.
_ABORT = 2.0


class Service(Protocol):
    """Periodic work of the monitor thread."""

    def tick(self, now: float) -> None:
        """Called twice a second and after messages, with `time.monotonic()`; must not wait."""

    def close(self) -> None:
        """The job is over for this rank; the channel still carries messages."""


class MonitorThread:
    """Handles messages, calls the services, and ends this process where its script cannot notice the end.

    Args:
        failure_detector: knows which ranks have failed or left.
        channel: whose `poll` only this thread calls.
        launched: whether the process that started this one must outlive it.
        abort: ends the whole job with an exit status, if the launcher can.
        status_after: the exit status of a job that ends because of a failure.
    """

    def __init__(
        self,
        failure_detector: FailureDetector,
        channel: Channel,
        launched: bool,
        abort: Callable[[int], None],
        status_after: Callable[[PeerFailed], int],
    ) -> None:
        self._failure_detector, self._channel = failure_detector, channel
        self._abort, self._status_after = abort, status_after
        self._parent = os.getppid() if launched else 0
        self._tells_of_parent = (
            launched and failure_detector.rank == 1 and self._parent == failure_detector.members.known[0].pid
        )
        self._services: list[Service] = []
        self._vital: list[Service] = []
        self._end_at = 0.0
        self._closed = threading.Event()
        self._thread = HelperThread(self._run, "ring:monitor")

    def start(self) -> None:
        """Start the thread; called by the thread that called `end_with_parent`, if any."""
        if self._tells_of_parent:
            outlive_parent()
        self._thread.start()

    def add(self, service: Service, vital: bool = False) -> None:
        """Add a service.

        Args:
            service: to call.
            vital: whether the job ends if it raises; others are dropped.
        """
        self._vital += [service] if vital else []
        self._services = [*self._services, service]

    def close(self, patience: float = 5.0) -> None:
        """Close the services and the channel, end the thread, and wait for that.

        Args:
            patience: seconds to wait at most.
        """
        self._closed.set()
        self._channel.wake()
        if self._tells_of_parent:
            end_with_parent()
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._channel.poll(_EVERY)
            self._end_without_launcher()
            self._failure_detector.forward_departures()
            self._call(lambda service: service.tick(time.monotonic()))
            self._end_after_failure()
        self._call(lambda service: service.close())
        self._channel.close()

    def _call(self, function: Callable[[Service], None]) -> None:
        for service in self._services:
            try:
                function(service)
            except Exception as error:
                if service in self._vital:
                    raise
                self._services = [other for other in self._services if other is not service]
                logger.error(
                    f"rank {self._failure_detector.rank}: {type(service).__name__} stopped: "
                    f"{type(error).__name__}: {error}"
                )

    def _end_without_launcher(self) -> None:
        if self._parent <= 1 or os.getppid() == self._parent:
            return
        detector = self._failure_detector
        if not self._tells_of_parent:
            logger.error(f"rank {detector.rank} ends because the launcher (process {self._parent}) is gone")
        elif not (detector.aborted or detector.has_raised):
            logger.error(f"rank {detector.rank} ends because {detector.failure() or 'rank 0 has ended'}")
        else:  # its script tells, unless it takes too long
            self._end_at = self._end_at or time.monotonic() + _GRACE
            if time.monotonic() < self._end_at:
                return
            if not detector.failed:
                logger.error(f"rank {detector.rank} ends because {detector.failure() or 'rank 0 has ended'}")
        os._exit(1)

    def _end_after_failure(self) -> None:
        detector = self._failure_detector
        failure = detector.failure()
        if failure is None or detector.aborted:
            return
        if detector.failed and not detector.has_lost_a_process():
            return  # all ranks failed alike, and their scripts may be about to try again
        now = time.monotonic()
        self._end_at = self._end_at or now + _GRACE
        if now < self._end_at or self._closed.is_set():
            return
        detector.fail(failure)
        self._call(lambda service: service.close())
        logger.error(f"rank {detector.rank} ends because {failure}")
        status = self._status_after(failure)
        aborting = HelperThread(lambda: self._abort(status), "ring:abort")
        aborting.start()
        aborting.join(_ABORT)
        os._exit(status)
