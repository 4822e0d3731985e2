"""The one place where a process waits for others: with an owner, a reason it can print, and a way out."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import PeerFailed, TimeoutExceeded, name_ranks

if TYPE_CHECKING:
    from ring_plugins.core.control.failure_detector import FailureDetector

#: Seconds of looking again and again before sleeping in between: above the time in which a peer that
#: works in step arrives, far below what a computing thread would miss.
_SPIN = 50e-6
_NAP = 50e-6
_LONG_NAP = 500e-6
_CHECK_EVERY = 0.02
_LONG = 1.0
#: Seconds for which a lost connection waits for news of the rank behind it; that it left in peace is told after two.
_LAST_WORDS = 3.0

_PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None, use_errno=True)
_yield_core = getattr(_libc, "sched_yield", lambda: 0)  # through ctypes, so that Python's lock is released


def nap_precisely() -> None:
    """Let short sleeps of the calling thread end on time: Linux rounds them up by 50 µs otherwise."""
    if hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


class LongWait(NamedTuple):
    """A wait that has lasted longer than peers in step take.

    Attributes:
        communicator: its name.
        what: the operation.
        number: operations of the communicator that are over.
        part_of: what that is a part of, such as a bucket, or "".
        missing: world ranks that have not arrived.
        since: time of `time.monotonic` at which it began.
        blocked_since: the same for the script itself, which may compute meanwhile: it is then the present.
        on_gpu: whether it is a GPU that waits, for some of `missing`: who waits there too has come.
    """

    communicator: str
    what: str
    number: int
    part_of: str
    missing: tuple[int, ...]
    since: float
    blocked_since: float
    on_gpu: bool = False


#: Of this process, by thread, and by ("stream", its handle) for those of GPUs. Another thread looks here now and then.
long_waits: dict[Hashable, LongWait] = {}


class Wait:
    """Waits on behalf of one communicator.

    Args:
        communicator: its name, for texts and to tell its waits from those of others.
        failure_detector: what becomes of the other ranks, or None where there is nobody to failure_detector.
    """

    def __init__(self, communicator: str, failure_detector: FailureDetector | None) -> None:
        self._communicator = communicator
        self._failure_detector = failure_detector
        #: What the operation under way is a part of, such as a bucket, for texts.
        self.part_of = ""
        #: Operations of the communicator that are over: equal on members in step.
        self.number = 0
        self._timeout = config.TIMEOUT.get()
        #: Since when a caller has been blocked until this communicator finishes something, or 0.
        self.caller_blocked_since = 0.0
        #: Seconds in which this communicator waited for members to come to an operation, in waits that are over.
        self.waited_for_arrival = 0.0
        self._arrival_awaited_since = 0.0

    def waited_so_far(self) -> float:
        """The same with the wait under way, if there is one."""
        since = self._arrival_awaited_since
        return self.waited_for_arrival + (time.monotonic() - since if since else 0.0)

    def until(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        what: Callable[[], str],
        arrival: bool = False,
        nap: Callable[[float], None] = time.sleep,
        spin: bool = True,
    ) -> None:
        """Return when `ready()`; raise when it cannot become true any more.

        Args:
            ready: a cheap look; may raise.
            missing: world ranks that have not arrived, asked only when the wait is long.
            what: the operation, for texts.
            arrival: whether this waits for members to come to the operation, and not for bytes to move.
            nap: how to sleep between two looks, `time.sleep` or something that also wakes when there is news.
            spin: whether to look again and again for a moment before the first sleep.

        Raises:
            PeerFailed, PeerLeft: a rank is gone.
            DeadlockError: ranks wait for each other in different operations.
            TimeoutExceeded: nothing happened for RING_TIMEOUT seconds.
        """
        on_main = threading.current_thread() is threading.main_thread()
        started = time.monotonic()
        if arrival:
            self._arrival_awaited_since = started
        try:
            spin_end = started + _SPIN if spin else started
            while time.monotonic() < spin_end:
                if ready():
                    return
                if on_main:
                    _yield_core()
            next_check = started + _CHECK_EVERY
            while not ready():
                now = time.monotonic()
                if now >= next_check:
                    next_check = now + _CHECK_EVERY
                    self._check(now, started, on_main, ready, missing, what)
                nap(_NAP if now - started < 1.0 else _LONG_NAP)
        except PeerFailed as error:
            self._look_for_the_cause(error, what)
            raise
        finally:
            seconds = time.monotonic() - started
            if arrival:
                self._arrival_awaited_since = 0.0
                self.waited_for_arrival += seconds
            if seconds > _LONG:
                long_waits.pop(threading.get_ident(), None)

    def _look_for_the_cause(self, error: PeerFailed, what: Callable[[], str]) -> None:
        """A connection has closed; that rank may have said why, over a way that takes a little longer."""
        failure_detector = self._failure_detector
        if failure_detector is None or failure_detector.told:
            return
        end = time.monotonic() + _LAST_WORDS
        while time.monotonic() < end:
            failure_detector.check(self._communicator, [error.rank], what())
            time.sleep(0.01)
        failure_detector.told = True

    def _check(
        self,
        now: float,
        started: float,
        on_main: bool,
        ready: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        what: Callable[[], str],
    ) -> None:
        absent = missing()
        if self._failure_detector is not None:
            try:
                self._failure_detector.check(self._communicator, absent, what())
            except Exception:
                if ready():  # the peer did arrive before it ended
                    return
                raise
        if now - started > _LONG:
            blocked_since = started if on_main else max(started, self.caller_blocked_since or now)
            long_waits[threading.get_ident()] = LongWait(
                self._communicator, what(), self.number, self.part_of, tuple(absent), started, blocked_since
            )
        if now - started > self._timeout:
            raise TimeoutExceeded(
                f"{what()} waited {self._timeout:g} s for {name_ranks(absent)}; set RING_TIMEOUT to wait longer."
            )
