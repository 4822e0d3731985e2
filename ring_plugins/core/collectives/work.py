"""Operations that run while the caller goes on."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ring_plugins.core.observe.recorder import recorder
from ring_plugins.core.waiting import nap_precisely

T = TypeVar("T")


class Work(Generic[T]):
    """An operation under way.

    Attributes:
        description: what it is, for texts.
    """

    def __init__(self, description: str, function: Callable[[], T], on_wait: Callable[[float], None]) -> None:
        self.description = description
        self._function: Callable[[], T] | None = function
        self._on_wait = on_wait
        self._finished = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._finished.is_set()

    def wait(self) -> T:
        """Wait for the operation and return its result.

        Raises:
            Exception: whatever the operation raised, with its own traceback.
        """
        if not self._finished.is_set():
            started = time.monotonic()
            self._on_wait(started)
            try:
                self._finished.wait()
            finally:
                self._on_wait(-started)
                if recorder.on:
                    recorder.record("wait", self.description, int(started * 1e9), time.monotonic_ns())
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result

    def run(self) -> None:
        """Do it; called once, by the thread that serves the queue."""
        function, self._function = self._function, None
        assert function is not None
        try:
            self._result = function()
        except BaseException as error:  # crosses to the caller whole, in `wait`
            self._error = error
        finally:
            self._finished.set()


class CommunicationThread:
    """Runs works one after the other, in the order in which they were given."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Work[Any] | None] = queue.SimpleQueue()
        self._unfinished = 0
        #: What is being run, for texts.
        self.current: Work[Any] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=f"ring:{name}", daemon=True)
        self._thread.start()

    def give(self, work: Work[Any]) -> None:
        with self._lock:
            self._unfinished += 1
        self._queue.put(work)

    def is_idle(self) -> bool:
        return self._unfinished == 0

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def end(self) -> None:
        """Let the thread end after the works it has."""
        self._queue.put(None)

    def close(self) -> None:
        """End the thread after the works it has, and wait for that a while."""
        self.end()
        if not self.is_current():
            with contextlib.suppress(RuntimeError):
                self._thread.join(timeout=5.0)

    def _serve(self) -> None:
        nap_precisely()
        while (work := self._queue.get()) is not None:
            self.current = work
            work.run()
            self.current = None
            del work  # and not keep its result until there is another
            with self._lock:
                self._unfinished -= 1
