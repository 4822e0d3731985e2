"""Runs the operations of one communicator one at a time, in the order in which they were called.

**Problem.** Ranks match collectives by their order alone, and two collectives of one communicator may not run at once.
Yet a training script calls them from its own thread while others run in the background: gradient buckets leave while
backward still computes.

**Idea.** Each communicator has a serial executor: a queue with one worker thread, like a CUDA stream. There are two
ways in:

- `start` queues a function for the executor's thread and returns a `Work` at once. The thread is created by the first
  `start`.
- `run` executes one operation and returns its result. Handing an operation to another thread and waking up again
  takes longer than a small all-reduce, so `run` executes it in the calling thread whenever nothing is queued, and
  otherwise queues it behind what was started before.

A function given to `start` calls the communicator's methods, and these call `run`, which executes at once on the
executor's own thread. So every operation passes through `run`, which also records what reports need: the current
operation, when it began, and how long it waited for other ranks.

**Failure.** After an error, `run` refuses everything that follows (see `FailureState`). An `ArgumentError` is the
exception, since it is raised before anything has been sent.

Considered and rejected: `concurrent.futures.ThreadPoolExecutor(max_workers=1)`. It cannot run a call in the caller's
thread, and its futures and worker keep references that delay the release of shared memory.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.collectives.api import Activity, FailureState, Statistics
from ring_plugins.core.collectives.fingerprint import Fingerprint
from ring_plugins.core.control.wait import Wait, nap_precisely
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.trace.steps import steps

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")


class SerialExecutor:
    """The executor of one communicator.

    Args:
        name: of the communicator, for error texts.
        wait: waits for other ranks on behalf of the operations.

    Attributes:
        statistics: what was executed so far.
        failure: the error, if any, after which nothing is executed any more.
    """

    def __init__(self, name: str, wait: Wait) -> None:
        self.statistics = Statistics()
        self.failure = FailureState(name)
        self._name, self._wait = name, wait
        self._lock = threading.RLock()
        self._thread: _Thread | None = None
        # The current or last operation.
        self._fingerprint: Fingerprint | None = None
        self._began = self._ended = 0.0

    def run(self, fingerprint: Fingerprint, operation: Callable[[Unpack[Ts], Fingerprint], T], *args: Unpack[Ts]) -> T:
        """Run `operation(*args, fingerprint)` after everything that was started before, and return its result.

        Raises:
            ArgumentError: the operation rejected its arguments; the next call may succeed.
            Exception: any other error, which every further call raises too.
        """
        thread = self._thread
        inside = thread is not None and thread.is_current()
        if thread is not None and not inside and not thread.is_idle():
            return self.start(fingerprint.text, lambda: self.run(fingerprint, operation, *args)).wait()
        with self._lock:
            if self.failure.error is not None:
                raise self.failure.error
            wait, statistics = self._wait, self.statistics
            work = thread.current if thread is not None and inside else None
            part_of = work.description if work is not None else ""
            wait.part_of = "" if fingerprint.text.startswith(part_of) else part_of
            wait.number = statistics.operations
            waited_before = wait.waited_for_arrival
            self._fingerprint = fingerprint
            self._began = began = time.monotonic()
            try:
                result = operation(*args, fingerprint)
            except ArgumentError:
                raise
            except RingError as error:
                self.failure.fail(error)
                raise
            except BaseException as error:
                self.failure.interrupt(fingerprint.text, error)
                raise
            self._ended = ended = time.monotonic()
            statistics.operations += 1
            statistics.working += ended - began
            waited = wait.waited_for_arrival - waited_before
            if not inside:
                steps.add_blocked_time(ended - began, waited)
            if recorder.on:
                recorder.record(
                    "operation" if inside else "call",
                    fingerprint.text,
                    int(began * 1e9),
                    int(ended * 1e9),
                    communicator=self._name,
                    part_of=wait.part_of,
                    waited_ms=round(waited * 1e3, 3),
                )
            return result

    def start(self, description: str, function: Callable[[], T]) -> BackgroundWork[T]:
        """Queue `function` behind everything that was started before, and return at once."""
        if self._thread is None:
            self._thread = _Thread(self._name)
        work = BackgroundWork(description, function, self._block_caller)
        self._thread.give(work)
        return work

    def _block_caller(self, work: BackgroundWork[Any]) -> None:
        """Wait for a work in the caller's thread, and count the time that the script is blocked."""
        began, waited_before = time.monotonic(), self._wait.waited_so_far()
        self._wait.caller_blocked_since = began
        try:
            work.finished.wait()
        finally:
            self._wait.caller_blocked_since = 0.0
            ended = time.monotonic()
            steps.add_blocked_time(ended - began, self._wait.waited_so_far() - waited_before)
            if recorder.on:
                recorder.record("wait", work.description, int(began * 1e9), int(ended * 1e9))

    def activity(self) -> Activity | None:
        """Return the current or last operation; any thread may call it."""
        fingerprint, began, ended = self._fingerprint, self._began, self._ended
        if fingerprint is None:
            return None
        ended = ended if ended >= began else 0.0
        return Activity(self._name, fingerprint.text, self._wait.part_of, began, ended, self.statistics.operations)

    def close(self) -> None:
        """End the thread once its queue is empty; further calls raise."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self.failure.close()

    def __del__(self) -> None:
        if self._thread is not None:
            self._thread.end()

    def detach_after_fork(self) -> None:
        """Make every call raise; for a forked child, which has no communication thread."""
        self._thread, self._lock = None, threading.RLock()
        self.failure.detach_after_fork()


class BackgroundWork(Generic[T]):
    """A `Work` that another thread runs.

    Args:
        description: for error texts and reports.
        function: performs the work.
        block: waits for `finished` on behalf of a caller.
    """

    def __init__(
        self, description: str, function: Callable[[], T], block: Callable[[BackgroundWork[Any]], None]
    ) -> None:
        self.description = description
        self.finished = threading.Event()
        self._function: Callable[[], T] | None = function
        self._block = block
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self) -> T:
        if not self.finished.is_set():
            self._block(self)
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result

    def run(self) -> None:
        """Call the function; called once."""
        function, self._function = self._function, None  # it may hold memory that the caller wants back
        assert function is not None
        try:
            self._result = function()
        except BaseException as error:  # raised in the caller's thread by `wait`
            self._error = error
        finally:
            self.finished.set()


class _Thread:
    """Runs works in the order in which they were given.

    It holds no reference to its executor, so that an unused communicator can be collected, which ends the thread.

    Attributes:
        current: the work that runs now.
    """

    def __init__(self, name: str) -> None:
        self.current: BackgroundWork[Any] | None = None
        self._queue: queue.SimpleQueue[BackgroundWork[Any] | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=f"ring:{name}", daemon=True)
        self._thread.start()

    def give(self, work: BackgroundWork[Any]) -> None:
        with self._lock:
            self._unfinished += 1
        self._queue.put(work)

    def is_idle(self) -> bool:
        return self._unfinished == 0

    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def end(self) -> None:
        """Let the thread end once its queue is empty."""
        self._queue.put(None)

    def close(self) -> None:
        """End the thread once its queue is empty; wait up to 5 s for that."""
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
            del work  # so that its result does not live until the next work
            with self._lock:
                self._unfinished -= 1
