"""Looking, without waiting, whether gloo's messages have arrived."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from ring_plugins.core.errors import RingError


class GlooPending:
    """Transfers under way. `done()` is a plain look at memory.

    torch's point-to-point works report completion only from a blocking `wait` (2.13,
    ProcessGroupGloo.hpp, SendWork and RecvWork), so waiting threads do that and count here.

    Args:
        peers: how many peers are still to be heard of.
        keep: what must stay alive until then.
    """

    def __init__(self, peers: int, keep: Any) -> None:
        self._left = peers
        self._keep = keep
        self._error: RingError | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether all transfers are complete.

        Raises:
            PeerFailed: a peer's connection broke; others may still be under way.
        """
        if self._error is not None:
            raise self._error
        return self._left == 0

    def finish_one(self, error: RingError | None) -> None:
        """One peer's transfers ended, with an error or without."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left == 0:
                self._keep = None


class Waiters:
    """Threads that block on behalf of those who may only look; as many as there are waits at one time.

    Fewer would not do: a wait that finishes late must never hide one that finished early, or two ranks could wait
    for each other. Daemons, so that a wait that never ends cannot keep the process alive.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    @property
    def busy(self) -> bool:
        """Whether some thread still waits for a transfer."""
        with self._lock:
            return self._idle < len(self._threads)

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job that blocks, at once."""
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._serve, name=f"ring:gloo-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads. One that returned from gloo while Python ends would crash the process."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=2.0)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and the memory that it transferred
            with self._lock:
                self._idle += 1
