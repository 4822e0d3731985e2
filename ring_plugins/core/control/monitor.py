"""A thread that looks after the job while the script computes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ring_plugins.core.base.log import logger
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.failure_detector import FailureDetector

#: Seconds between looks, and those that a script has to notice a failed peer by itself before its process is ended.
_EVERY, _GRACE = 0.5, 5.0


class Service(Protocol):
    """Something that is done now and then, beside the job."""

    def tick(self, now: float) -> None:
        """Called twice a second and after messages, with the time of `time.monotonic`; must not wait."""

    def close(self) -> None:
        """The job is over here; the channel still carries messages."""


class MonitorThread:
    """Moves the control channel, calls the services, and ends this process where its script cannot notice the end.

    That is when a peer failed while the script computes or waits elsewhere, and when the launcher that should end all
    ranks was killed itself.

    Args:
        failure_detector: what becomes of the others.
        channel: moved here.
        launched: whether the process that started this one must outlive it.
        abort: ends the whole job where the launcher offers that.
    """

    def __init__(
        self, failure_detector: FailureDetector, channel: Channel, launched: bool, abort: Callable[[], None]
    ) -> None:
        self._failure_detector, self._channel, self._abort = failure_detector, channel, abort
        self._parent = os.getppid() if launched else 0
        self._services: list[Service] = []
        self._end_at = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ring:guard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, service: Service) -> None:
        """Call this service from now on."""
        self._services = [*self._services, service]

    def close(self, patience: float = 5.0) -> None:
        """End the thread, which lets services end first; wait for that a while."""
        self._closed.set()
        self._channel.flush(0)
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._channel.poll(_EVERY)
            self._end_without_launcher()
            self._failure_detector.announce()
            self._serve(lambda service: service.tick(time.monotonic()))
            self._end_after_failure()
        self._serve(lambda service: service.close())
        self._channel.close()

    def _serve(self, call: Callable[[Service], None]) -> None:
        for service in self._services:
            try:
                call(service)
            except Exception as error:  # what only looks on must never harm the job
                self._services = [other for other in self._services if other is not service]
                logger.error(
                    f"rank {self._failure_detector.rank}: {type(service).__name__} stopped: "
                    f"{type(error).__name__}: {error}"
                )

    def _end_without_launcher(self) -> None:
        if self._parent > 1 and os.getppid() != self._parent:
            logger.error(
                f"rank {self._failure_detector.rank} ends because the launcher (process {self._parent}) is gone"
            )
            os._exit(1)

    def _end_after_failure(self) -> None:
        failure_detector = self._failure_detector
        failure = failure_detector.failure()
        if failure is None or failure_detector.told:
            return
        if failure_detector.failed and not failure_detector.has_lost_a_process():
            return  # ranks failed alike, and their scripts may be about to try again
        now = time.monotonic()
        self._end_at = self._end_at or now + _GRACE
        if now < self._end_at or self._closed.is_set():
            return
        failure_detector.fail(failure)
        self._serve(lambda service: service.close())
        logger.error(f"rank {failure_detector.rank} ends because {failure}")
        aborting = threading.Thread(target=self._abort, daemon=True)  # may block where MPI is broken too
        aborting.start()
        aborting.join(2.0)
        os._exit(1)
