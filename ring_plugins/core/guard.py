"""A thread that looks after the job while the script computes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ring_plugins.core.control.channel import Channel
from ring_plugins.core.failure import Watch

#: Seconds between looks, and those that a script has to notice a failed peer by itself before its process is ended.
_EVERY, _GRACE = 0.5, 5.0


class Service(Protocol):
    """Something that is done now and then, beside the job."""

    def tick(self, now: float) -> None:
        """Called twice a second and after messages, with the time of `time.monotonic`; must not wait."""

    def close(self) -> None:
        """The job is over here; the channel still carries messages."""


class Guard:
    """Moves the control channel, calls the services, and ends this process where its script cannot notice the end.

    That is when a peer failed while the script computes or waits elsewhere, and when the launcher that should end all
    ranks was killed itself.

    Args:
        watch: what becomes of the others.
        channel: moved here.
        launched: whether the process that started this one must outlive it.
        abort: ends the whole job where the launcher offers that.
    """

    def __init__(self, watch: Watch, channel: Channel, launched: bool, abort: Callable[[], None]) -> None:
        self._watch, self._channel, self._abort = watch, channel, abort
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
            self._watch.announce()
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
                say(f"rank {self._watch.rank}: {type(service).__name__} stopped: {type(error).__name__}: {error}")

    def _end_without_launcher(self) -> None:
        if self._parent > 1 and os.getppid() != self._parent:
            say(f"rank {self._watch.rank} ends because the launcher (process {self._parent}) is gone")
            os._exit(1)

    def _end_after_failure(self) -> None:
        watch = self._watch
        failure = watch.failure()
        if failure is None or watch.told:
            return
        if watch.failed and not watch.has_lost_a_process():
            return  # ranks failed alike, and their scripts may be about to try again
        now = time.monotonic()
        self._end_at = self._end_at or now + _GRACE
        if now < self._end_at or self._closed.is_set():
            return
        watch.fail(failure)
        self._serve(lambda service: service.close())
        say(f"rank {watch.rank} ends because {failure}")
        aborting = threading.Thread(target=self._abort, daemon=True)  # may block where MPI is broken too
        aborting.start()
        aborting.join(2.0)
        os._exit(1)


def say(text: str) -> None:
    """Print for the user, where there is still somewhere to print to: the launcher's end of the pipe may be gone."""
    with contextlib.suppress(OSError, ValueError):
        print(f"ring_plugins: {text}", file=sys.stderr, flush=True)
