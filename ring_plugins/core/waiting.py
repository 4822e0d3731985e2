"""The one place where a process waits for others: with an owner, a reason it can print, and a way out."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence

from ring_plugins.core.errors import ArgumentError, DeadlockError, TimeoutExceeded
from ring_plugins.core.presence import Neighbourhood

#: Seconds of looking again and again before sleeping in between: above the time in which a peer that
#: works in step arrives, far below what a computing thread would miss.
_SPIN = 50e-6
_NAP = 50e-6
_LONG_NAP = 500e-6
_CHECK_EVERY = 0.02
_DEADLOCK_PATIENCE = 3.0

_PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None, use_errno=True)
_yield_core = getattr(_libc, "sched_yield", lambda: 0)  # through ctypes, so that Python's lock is released


def nap_precisely() -> None:
    """Let short sleeps of the calling thread end on time: Linux rounds them up by 50 µs otherwise."""
    if hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


def seconds_from_environment(name: str, default: float) -> float:
    """A duration from an environment variable.

    Raises:
        ArgumentError: not a positive number.
    """
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if value <= 0:
        raise ArgumentError(f"{name}={text!r} is not a positive number of seconds.")
    return value


class Wait:
    """Waits on behalf of one communicator.

    Args:
        communicator: its name, for texts and to tell its waits from those of others.
        neighbourhood: the ranks of this host, or None where there is none to watch.
    """

    def __init__(self, communicator: str, neighbourhood: Neighbourhood | None) -> None:
        self._communicator = communicator
        self._neighbourhood = neighbourhood
        self._timeout = seconds_from_environment("RING_TIMEOUT", 1800.0)
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
    ) -> None:
        """Return when `ready()`; raise when it cannot become true any more.

        Args:
            ready: a cheap look; may raise.
            missing: world ranks that have not arrived, asked only when the wait is long.
            what: the operation, for texts.
            arrival: whether this waits for members to come to the operation, and not for bytes to move.

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
            spin_end = started + _SPIN
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
                time.sleep(_NAP if now - started < 1.0 else _LONG_NAP)
        finally:
            seconds = time.monotonic() - started
            if arrival:
                self._arrival_awaited_since = 0.0
                self.waited_for_arrival += seconds
            if self._neighbourhood is not None and seconds > 1.0:
                self._neighbourhood.own.unblock()

    def _check(
        self,
        now: float,
        started: float,
        on_main: bool,
        ready: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        what: Callable[[], str],
    ) -> None:
        neighbourhood = self._neighbourhood
        absent = missing()
        if neighbourhood is not None:
            try:
                neighbourhood.check(absent, what())
            except Exception:
                if ready():  # the peer did arrive before it ended
                    return
                raise
            since = started if on_main else max(started, self.caller_blocked_since or now)
            if now - since > 1.0:
                neighbourhood.own.block(self._communicator, what(), absent, since)
                deadlock = neighbourhood.deadlock(self._communicator, what(), absent, since, _DEADLOCK_PATIENCE)
                if deadlock is not None and not ready():
                    neighbourhood.told = True
                    raise DeadlockError(deadlock)
        if now - started > self._timeout:
            raise TimeoutExceeded(
                f"{what()} waited {self._timeout:g} s for rank{'s' if len(absent) > 1 else ''} "
                f"{', '.join(map(str, absent))}; set RING_TIMEOUT to wait longer."
            )
