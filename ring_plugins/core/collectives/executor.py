"""Operations of one communicator happen one at a time, in the order of the calls, whichever thread runs them."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.collectives.api import CommunicationThread, FailureState, Statistics, Work
from ring_plugins.core.collectives.fingerprint import Fingerprint, fingerprint
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.trace.steps import steps

T = TypeVar("T")


class Activity(NamedTuple):
    """What a rank does, or did last, with a communicator.

    Attributes:
        communicator: its name.
        operation: its signature's text.
        part_of: the work that it is a part of, such as a bucket; "" for a call of the script's own.
        began, ended: times of `time.monotonic`; `ended` is 0 while it is under way.
        number: operations finished with this communicator.
    """

    communicator: str
    operation: str
    part_of: str
    began: float
    ended: float
    number: int


def blocking(method: Callable[..., T]) -> Callable[..., T]:
    """Run a method in the caller's thread, in order with what was started, and remember a failure."""

    @functools.wraps(method)
    def call(self: SerialExecutor, *args: Any, **kwargs: Any) -> T:
        return self._in_order(method, args, kwargs)

    return call


class SerialExecutor:
    """What a communicator inherits to keep its calls in order, and to remember that it has failed.

    A call runs in the caller's thread when nothing is under way, which saves the hand-over, and otherwise
    in the communication thread after what was started before. After an error that leaves members out of
    step every further call raises it again.

    Args:
        name: of the communicator, for texts.
        wait: what its operations wait with.
    """

    def __init__(self, name: str, wait: Wait) -> None:
        self.name = name
        self.statistics = Statistics()
        self._wait = wait
        self._lock = threading.RLock()
        self._thread: CommunicationThread | None = None
        self._failure = FailureState(name)
        self._operation, self._began, self._ended = "", 0.0, 0.0
        self._fingerprint: Fingerprint | None = None
        self._waited_before = 0.0

    def _sign(self, kind: str, dtype: str = "", count: int = -1, detail: str = "") -> Fingerprint:
        """The `signature` of the operation that begins, remembered for those who ask what this rank does."""
        self._fingerprint = sign = fingerprint(kind, dtype, count, detail)
        return sign

    def activity(self) -> Activity | None:
        """What this rank did last with this communicator, or does now; asked by another thread."""
        if not self._began:
            return None
        sign = self._fingerprint
        text = sign.text if sign is not None and sign.text.startswith(self._operation) else self._operation
        began, ended = self._began, self._ended
        ended = ended if ended >= began else 0.0
        return Activity(self.name, text, self._wait.part_of, began, ended, self.statistics.operations)

    def _in_order(self, method: Callable[..., T], args: Sequence[Any], kwargs: dict[str, Any]) -> T:
        thread = self._thread
        inside = thread is not None and thread.is_current()
        if thread is not None and not inside and not thread.is_idle():
            return self.start(method.__name__, lambda: self._in_order(method, args, kwargs)).wait()
        with self._lock:
            if self._failure.error is not None:
                raise self._failure.error
            work = thread.current if thread is not None and inside else None
            self._wait.part_of = work.description if work is not None and work.description != method.__name__ else ""
            self._wait.number = self.statistics.operations
            waited_before = self._wait.waited_for_arrival
            self._operation = method.__name__
            self._began = started = time.monotonic()
            try:
                result = method(self, *args, **kwargs)
            except ArgumentError:
                raise
            except RingError as error:
                self._failure.fail(error)
                raise
            except BaseException as error:
                self._failure.interrupt(method.__name__, error)
                raise
            self._ended = time.monotonic()
            elapsed = self._ended - started
            statistics = self.statistics
            statistics.operations += 1
            statistics.working += elapsed
            waited = self._wait.waited_for_arrival - waited_before
            if not inside:
                statistics.waited += elapsed
                steps.stood_still(elapsed, waited)
            if recorder.on:
                self._record("operation" if inside else "call", started, waited)
            return result

    def _record(self, kind: str, started: float, waited: float) -> None:
        activity = self.activity()
        assert activity is not None
        recorder.record(
            kind,
            activity.operation,
            int(started * 1e9),
            int(self._ended * 1e9),
            communicator=self.name,
            part_of=activity.part_of,
            waited_ms=round(waited * 1e3, 3),
        )

    def _caller_waits(self, since: float) -> None:
        """A caller starts (positive time) or ends (negative) to wait for a work."""
        if since > 0:
            self._wait.caller_blocked_since = since
            self._waited_before = self._wait.waited_so_far()
        else:
            self._wait.caller_blocked_since = 0.0
            seconds = time.monotonic() + since
            self.statistics.waited += seconds
            steps.stood_still(seconds, self._wait.waited_so_far() - self._waited_before)

    def start(self, description: str, function: Callable[[], T]) -> Work[T]:
        if self._thread is None:
            self._thread = CommunicationThread(self.name)
        work = Work(description, function, self._caller_waits)
        self._thread.give(work)
        return work

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to gain here: every operation is on its way when it is called."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """End the communication thread; further calls raise."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self._failure.close()

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)  # None too where the members never met
        if thread is not None:
            thread.end()

    def detach_after_fork(self) -> None:
        """In a forked child: let every call raise, since it would disturb the parent and its peers."""
        self._thread, self._lock = None, threading.RLock()
        self._failure.leave_to_parent()
