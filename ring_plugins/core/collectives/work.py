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


class QueuedWork(Work[T]):
    """An operation under way on a GPU.

    Args:
        description: as `Work`.
        result: what `wait` returns, to be used on the stream that was made to wait.
        is_done: whether the GPU has finished it; asks, never waits.
        join: lets the calling thread's stream wait for it.
    """

    def __init__(self, description: str, result: T, is_done: Callable[[], bool], join: Callable[[], None]) -> None:
        super().__init__(description, lambda: result, lambda _: None)
        self._result, self._is_done, self._join = result, is_done, join

    def done(self) -> bool:
        """Whether the GPU has finished it; asks, never waits."""
        return self._is_done()

    def wait(self) -> T:
        """Let the calling thread's stream wait for it, not the thread itself, and return the result."""
        self._join()
        result: T = self._result
        return result


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
