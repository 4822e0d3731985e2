"""The one loop in which a rank waits for others: it can name the missing ranks and the reason, and always ends.

The problem: ranks wait for each other in many places (shared-memory barriers, sockets, MPI, GPUs), and each time the
peer may have failed, left, taken another path through the program, or simply need an hour. A blocking receive cannot
tell these apart, and nobody can interrupt it. Libraries therefore add a watchdog thread that kills the process after a
time-out (torch's ProcessGroupNCCL does), but such a thread cannot make a blocked call raise, and it knows only that
time has passed.

Here every wait polls a cheap condition. It goes through phases, as an adaptive mutex does:

1. Spin for 50 µs, or as long as the caller says: a peer in step arrives within that time, and sleeping would cost more.
2. Sleep between checks, as the caller chooses: on a futex, in poll(2), or for a short time that grows after a second.
3. Every 20 ms ask the failure detector whether the operation can still complete. If not, raise its error.
4. After a second, publish the wait in `long_waits`, from which stall reports and deadlock detection are made.
5. After RING_TIMEOUT, raise.

A connection that breaks says only that the peer is gone. Its reason may still be in flight on the control channel, so
the wait gives it some seconds before raising the bare fact.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import (
    MembersLost,
    MismatchError,
    PeerFailed,
    PeerLeft,
    RingError,
    TimeoutExceeded,
    fresh,
    name_ranks,
)

if TYPE_CHECKING:
    from ring_plugins.core.control.failure_detector import FailureDetector

#: Seconds of spinning before the first sleep: above the time in which a peer in step arrives, far below what a
#: computing thread would miss.
SPIN = 50e-6
#: Seconds of a sleep between two checks, in the first second of a wait and after it.
_NAP, _LONG_NAP = 50e-6, 500e-6
#: Seconds between two calls of the failure detector.
_CHECK_EVERY = 0.02
#: Seconds after which a wait is long, that is, published in `long_waits`.
LONG = 1.0
#: Seconds for which a broken connection waits for the peer's reason. Above the two seconds after which the failure
#: detector reports that a rank left normally. On several hosts that go on after losses, it comes on top of the
#: RING_NETWORK_TIMEOUT after which the mesh knows whether the peer is dead or silent.
REASON = 3.0

#: Seconds for which the last rejection of a rank that has left may be in flight on the control channel.
_LAST_REJECTION = 0.5

_PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None, use_errno=True)
_yield_core = getattr(_libc, "sched_yield", lambda: 0)  # through ctypes, which releases the GIL


def nap_precisely() -> None:
    """Let short sleeps of the calling thread end on time: Linux otherwise rounds them up by 50 µs."""
    if hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


class LongWait(NamedTuple):
    """A wait of more than `LONG` seconds.

    Attributes:
        communicator: its identity, see `Wait`.
        what: the operation.
        number: how many operations of the communicator have finished.
        part_of: what the operation is a part of, such as a bucket, or "".
        missing: world ranks that have not arrived.
        since: when it began, by `time.monotonic`.
        blocked_since: the same for the script itself; the present while the script computes.
        on_gpu: whether a GPU waits, for some of `missing`: a rank that waits there too has arrived.
    """

    communicator: str
    what: str
    number: int
    part_of: str
    missing: tuple[int, ...]
    since: float
    blocked_since: float
    on_gpu: bool = False


class PeerRejected(MismatchError):
    """A member rejected the arguments of the operation in which this one waits for it."""


class Background(Protocol):
    """The operations of a communicator that another thread runs.

    Attributes:
        unfinished: how many are queued or under way.
    """

    unfinished: int


#: Long waits of this process, by thread, and by ("stream", handle) for those of GPUs. Other threads read it.
long_waits: dict[Hashable, LongWait] = {}


#: What keeps this rank from operations in which others may wait for it, a sentence by whoever knows. Deadlocks tell it.
hindrances: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class Failure(Protocol):
    """What `core.collectives.api.FailureState` knows."""

    error: BaseException | None


class Wait:
    """Waits on behalf of one communicator.

    Args:
        communicator: its name, for messages.
        failure_detector: knows which ranks have failed or left; None in a job of one rank.
        key: equal on all members, and different for any two communicators of the job; -1 for none.

    Attributes:
        identity: tells its waits from those of other communicators, of which some may have the same name.
        part_of: what the operation under way is a part of, such as a bucket, for messages.
        number: how many operations of the communicator have finished; equal on members in step.
        begun: whether other members can tell that the operation under way has begun. The executor clears it before each
            operation; the groups set it before they send or announce anything.
        failure: why the communicator can no longer be used, if it cannot; every wait under way then raises that.
        given_up: why operations of other threads than the script's are to end; None if they are not.
        is_within_host: whether members of other hosts have nothing to do with it, and so do not interrupt it.
        entered: how many have begun.
        rejected: how many calls this member has rejected since.
        background: its operations on another thread, None if there were none.
        caller_blocked_since: since when a caller has been blocked until this communicator finishes something, or 0.
        waited_for_arrival: seconds spent waiting for members to arrive at an operation, in waits that are over.
    """

    def __init__(self, communicator: str, failure_detector: FailureDetector | None, key: int = -1) -> None:
        self.identity = communicator if key < 0 else f"{communicator} #{key}"
        self._failure_detector = failure_detector
        self._timeout = config.TIMEOUT.get()
        self.part_of = ""
        self.begun = False
        self.failure: Failure | None = None
        self.given_up: BaseException | None = None
        self.is_within_host = False
        self._check_construction: Callable[[], object] | None = None
        if key >= 0:
            waits_of_communicators[self.identity] = self
        self.number = self.entered = self.rejected = 0
        self._key = key
        self.background: Background | None = None
        self.caller_blocked_since = 0.0
        self.waited_for_arrival = 0.0
        self._arrival_awaited_since = 0.0

    def renew(self, communicator: str, key: int, failure_detector: FailureDetector | None) -> None:
        """Wait for the members of a communicator that this one has joined; arguments as in the constructor."""
        waits_of_communicators.pop(self.identity, None)
        self.identity, self._key, self._failure_detector = f"{communicator} #{key}", key, failure_detector
        waits_of_communicators[self.identity] = self

    @contextlib.contextmanager
    def constructing(self, check: Callable[[], object]) -> Iterator[None]:
        """Wait inside the context for members that make the communicator, and have not begun an operation.

        Args:
            check: called in every such wait; may raise.
        """
        self.number = self.entered = -1
        self._check_construction = check
        yield
        self._check_construction = None
        self.number = self.entered = 0

    def will_enter(self, number: int) -> bool:
        """Whether this rank has begun the operation of this number, or may begin it without its script."""
        return self.entered > number or (self.background is not None and self.background.unfinished > 0)

    def waited_so_far(self) -> float:
        """`waited_for_arrival` including the wait under way, if there is one."""
        since = self._arrival_awaited_since
        return self.waited_for_arrival + (time.monotonic() - since if since else 0.0)

    def until(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        what: Callable[[], str],
        arrival: bool = False,
        nap: Callable[[float], None] = time.sleep,
        spin: float = SPIN,
        receiving: Callable[[int], bool] | None = None,
    ) -> None:
        """Return when `ready()`; raise when it cannot become true any more.

        Args:
            ready: a cheap condition; may raise.
            missing: world ranks that have not arrived; called only if the wait lasts.
            what: the operation, for messages.
            arrival: whether this waits for members to arrive at the operation rather than for bytes to move.
            nap: sleeps between two checks: `time.sleep`, or a function that returns early when something arrives.
            spin: seconds of spinning before the first sleep; `SPIN` at most on other threads than the main one, which
                hold the interpreter's lock meanwhile.
            receiving: whether bytes of a rank still arrive, which are not lost if it has left meanwhile.

        Raises:
            PeerFailed, PeerLeft: a rank is gone.
            MembersLost: only ranks are missing without which the job can go on; on several hosts, a rank is lost.
            DeadlockError: ranks wait for each other in different operations.
            TimeoutExceeded: nothing happened for RING_TIMEOUT seconds.
        """
        on_main = threading.current_thread() is threading.main_thread()
        started = time.monotonic()
        if arrival:
            self._arrival_awaited_since = started
        try:
            spin_end = started + (spin if on_main else min(spin, SPIN))
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
                    self._check(now, started, on_main, ready, missing, what, receiving)
                nap(_NAP if now - started < 1.0 else _LONG_NAP)
        except MembersLost:
            raise
        except PeerFailed as error:
            detector = self._failure_detector
            if detector is not None and not detector.aborted and not isinstance(error, PeerLeft):
                self.raise_reason(error.rank, what)  # in place of the bare fact, if it arrives in time
                detector.aborted = True
            raise
        finally:
            seconds = time.monotonic() - started
            if arrival:
                self._arrival_awaited_since = 0.0
                self.waited_for_arrival += seconds
            if seconds > LONG:
                long_waits.pop(threading.get_ident(), None)

    def _check(
        self,
        now: float,
        started: float,
        on_main: bool,
        ready: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        what: Callable[[], str],
        receiving: Callable[[int], bool] | None,
    ) -> None:
        self._check_failure(ready)
        detector = self._failure_detector
        mesh = detector.mesh if detector is not None else None
        dead = mesh.dead() if mesh is not None else frozenset()  # before looking who has arrived, or not
        absent = missing()
        if detector is not None:
            try:
                lost = [rank for rank in absent if receiving is None or not receiving(rank)]
                self._check_members(detector, lost, what)
                if mesh is not None and mesh.interrupts(dead, absent, self.is_within_host):
                    raise mesh.members_lost()
            except RingError:  # and no signal handler's exception
                if ready():  # the peer did arrive before it ended
                    return
                raise
            self._check_rejections(detector, absent, what, ready)
        if now - started > LONG:
            blocked_since = started if on_main else max(started, self.caller_blocked_since or now)
            long_waits[threading.get_ident()] = LongWait(
                self.identity, what(), self.number, self.part_of, tuple(absent), started, blocked_since
            )
        if now - started > self._timeout:
            raise TimeoutExceeded(
                f"{what()} timed out after waiting {self._timeout:g} s for {name_ranks(absent)}; set RING_TIMEOUT to "
                "wait longer."
            )

    def _check_failure(self, ready: Callable[[], bool] = lambda: False) -> None:
        error = self.failure.error if self.failure is not None else None
        if error is not None and not ready():
            raise fresh(error)
        if self.given_up is not None and not ready():
            raise fresh(self.given_up)
        if self._check_construction is not None:
            self._check_construction()

    def _check_members(self, detector: FailureDetector, missing: Sequence[int], what: Callable[[], str]) -> None:
        try:
            detector.check(self.identity, missing, what())
        except PeerLeft:  # perhaps after it rejected this operation and its script caught the error
            end = time.monotonic() + _LAST_REJECTION
            while time.monotonic() < end:
                self._check_rejections(detector, missing, what)
                time.sleep(0.01)
            raise

    def _check_rejections(
        self,
        detector: FailureDetector,
        absent: Sequence[int],
        what: Callable[[], str],
        ready: Callable[[], bool] = lambda: False,
    ) -> None:
        if self._key < 0:
            return
        rejection = detector.rejection(self._key, self.number, self.rejected, absent)
        if rejection and not ready():
            text = f"{rejection} Rank {detector.rank} waits for it in {what()}."
            if (exited := next(filter(detector.facts.exit_statuses.get, absent), -1)) >= 0:
                detector.aborted = True
                raise PeerFailed(text, exited)
            raise PeerRejected(text)

    def raise_reason(self, rank: int, what: Callable[[], str]) -> None:
        """Wait some seconds for the reason why a peer is gone, and raise it; return if none arrives.

        Args:
            rank: the peer's world rank.
            what: the operation, for messages.
        """
        detector = self._failure_detector
        mesh = detector.mesh if detector is not None else None
        end = time.monotonic() + REASON + (config.NETWORK_TIMEOUT.get() if mesh is not None else 0.0)
        while time.monotonic() < end:
            self._check_failure()
            if detector is not None:
                self._check_members(detector, [rank], what)
                self._check_rejections(detector, [rank], what)
                if mesh is not None and mesh.interrupts(mesh.dead(), [rank], self.is_within_host):
                    raise mesh.members_lost()
            time.sleep(0.01)


#: The waits of this process's communicators, by identity.
waits_of_communicators: weakref.WeakValueDictionary[str, Wait] = weakref.WeakValueDictionary()
