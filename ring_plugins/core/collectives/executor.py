"""Runs the operations of one communicator one at a time, in the order in which they were called.

**Problem.** Ranks match collectives by their order alone, and two collectives of one communicator may not run at once.
Yet a training script calls them from its own thread while others run in the background: gradient buckets leave while
backward still computes.

**Idea.** Each communicator has a serial executor: a queue with one worker thread, like a CUDA stream. There are three
ways in:

- `start` queues a function for the executor's thread and returns a `Work` at once. The thread is created by the first
  `start`.
- `run` executes one operation and returns its result. Handing an operation to another thread and waking up again
  takes longer than a small all-reduce, so `run` executes it in the calling thread whenever nothing is queued, and
  otherwise queues it behind what was started before.
- `run_synchronously` is `start` without the thread: the caller's thread runs the function, and returns when it is done.
  Where every core computes, a second thread hides nothing and costs a core, the interpreter's lock and the caches.

A function given to `start` or `run_synchronously` calls the communicator's methods, and these call `run`, which
executes at once on the thread that runs the function. So every operation passes through `run`, which also records what
reports need: the current operation, when it began, and how long it waited for other ranks.

**Failure.** After an error, `run` rejects everything that follows (see `FailureState`). An `ArgumentError` is the
exception, since it is raised before anything has been sent.

**Interruption.** A signal handler may raise at any time: KeyboardInterrupt, a time limit, a notebook's stop button. So
may code that lacks memory. A script that catches this goes on, and overwrites memory that a reduction still reads or
writes. So an exception that ends an operation, or the wait for one, breaks the communicator on all members, unless no
member can know yet that the operation has begun. `interrupt` does that in an order that leaves no gap: no further call
here, then tell the members, then wait until the executor's thread has let go of the memory, then raise.

**Losses.** The executor's `Recovery` says what follows when members die in an operation, in jobs that go on
(recovery.py).

Considered and rejected: `concurrent.futures.ThreadPoolExecutor(max_workers=1)`. It cannot run a call in the caller's
thread, and its futures and worker keep references that delay the release of shared memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ring_plugins.core.base.errors import (
    ArgumentError,
    DeadlockError,
    MembersLost,
    MismatchError,
    PeerFailed,
    RingError,
    is_first_report,
    is_rejection,
)
from ring_plugins.core.base.threads import wait_for_event
from ring_plugins.core.collectives.api import Activity, FailureState, Statistics
from ring_plugins.core.collectives.background import BackgroundWork, QueueThread
from ring_plugins.core.collectives.fingerprint import (
    Fingerprint,
    MismatchAfterRejection,
    after_rejections,
    current_purpose,
    for_purpose,
    purpose,
)
from ring_plugins.core.control.wait import PeerRejected, Wait
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.trace.steps import steps

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

#: Seconds for which an interrupted caller waits for the executor's thread, which notices within 20 ms unless it copies.
_LET_GO = 5.0


class SerialExecutor:
    """The executor of one communicator.

    Args:
        name: of the communicator, for error texts.
        wait: waits for other ranks on behalf of the operations.
        members: told when this member is interrupted.
        recovery: what follows when members are lost; None where that ends the job.

    Attributes:
        statistics: what was executed so far.
        failure: the error, if any, after which nothing is executed any more.
        goes_on_after_mismatch: whether members are in step after a `MismatchError` of a blocking call.
        number_base: what is added to the number of operations finished, so that all members give the next the same.
        members, wait: as given.
    """

    def __init__(self, name: str, wait: Wait, members: Members | None = None, recovery: Recovery | None = None) -> None:
        self.statistics = Statistics()
        self.failure = wait.failure = FailureState(name)
        self._name, self.wait, self.members = name, wait, members
        self._lock = threading.RLock()
        self._is_running = False
        self.goes_on_after_mismatch = False
        self._recovery = recovery
        self._thread: QueueThread | None = None
        self.number_base = 0
        #: The thread that is in `run_synchronously`, 0 for none, and what it runs.
        self._synchronous_thread, self._synchronous = 0, ""
        # The current or last operation.
        self._fingerprint: Fingerprint | None = None
        self._began = self._ended = 0.0

    def run(self, fingerprint: Fingerprint, operation: Callable[[Unpack[Ts], Fingerprint], T], *args: Unpack[Ts]) -> T:
        """Run `operation(*args, fingerprint)` after everything that was started before, and return its result.

        Raises:
            ArgumentError: the operation rejected its arguments; the next call may succeed.
            Exception: any other error, which every further call raises too.
        """
        fingerprint = for_purpose(fingerprint, needed_for) if (needed_for := current_purpose.text) else fingerprint
        thread, caller = self._thread, threading.get_ident()
        on_thread = thread is not None and thread.ident == caller
        inside = on_thread or self._synchronous_thread == caller
        if thread is not None and not inside and (thread.late or thread.unfinished):
            return self._run_behind(fingerprint, operation, *args)
        with self._lock:
            failure, wait, statistics, recovery = self.failure, self.wait, self.statistics, self._recovery
            if failure.error is not None or self._is_running:
                self._reject_now(fingerprint.text)
            fingerprint = after_rejections(fingerprint, wait.rejected) if wait.rejected else fingerprint
            part_of = work.description if inside and thread and (work := thread.current) else self._synchronous
            wait.part_of = part_of if part_of and not fingerprint.text.startswith(part_of) else ""
            wait.number = number = self.number_base + statistics.operations
            wait.entered = number + 1
            self._fingerprint, wait.begun, waited_before = fingerprint, False, wait.waited_for_arrival
            self._began = began = time.monotonic()
            try:
                self._is_running = True
                result = (operation if recovery is None else recovery.allowed(self, operation))(*args, fingerprint)
            except ArgumentError:
                raise
            except MismatchError as error:
                self._fail_by_mismatch(fingerprint.text, error, inside)
                raise
            except (PeerFailed, DeadlockError) as error:  # which the other members raise too
                self.fail_or_recover(error, fingerprint.text)
                raise
            except BaseException as error:
                if wait.begun or isinstance(error, RingError):
                    self.interrupt(fingerprint.text, error)
                else:
                    self.reject(fingerprint.text, error)
                raise
            finally:
                self._is_running = False
            if failure.error is not None:
                failure.check()  # a member may have overwritten the memory before it was read
            self._ended = ended = time.monotonic()
            statistics.operations += 1
            wait.rejected = 0
            statistics.working += ended - began
            waited = wait.waited_for_arrival - waited_before
            if not on_thread:
                steps.waiting += waited
                steps.moving += ended - began - waited
            if recorder.on:
                self._record("operation" if inside else "call", fingerprint.text, began, ended, waited)
            return result

    def _record(self, kind: str, text: str, began: float, ended: float, waited: float) -> None:
        recorder.record(
            kind,
            text,
            int(began * 1e9),
            int(ended * 1e9),
            communicator=self._name,
            part_of=self.wait.part_of,
            waited_ms=round(waited * 1e3, 3),
        )

    def fail_or_recover(self, error: RingError, operation: str) -> None:
        """Let nothing follow after an error, unless members died and the others agree to go on without them."""
        if not isinstance(error, MembersLost):
            self.failure.fail(error)
            return
        try:
            if self._recovery is None:
                raise PeerFailed(str(error), error.rank)
            self._recovery.follow(self, error)
        except (PeerFailed, DeadlockError) as reason:
            self.failure.fail(reason)
            raise
        except BaseException as reason:  # the others wait for this rank's part in the agreement
            self.interrupt(operation, reason)
            raise

    def is_on_thread(self) -> bool:
        """Whether the caller is the executor's own thread."""
        return self._thread is not None and self._thread.is_current()

    def let_go(self) -> bool:
        """Wait some seconds for the executor's thread to become idle; returns whether it is."""
        if self._thread is not None:
            self._thread.wait_until_idle(_LET_GO)
        return self._thread is None or not self._thread.unfinished

    def _fail_by_mismatch(self, text: str, error: MismatchError, inside: bool) -> None:
        """Break the communicator, unless all members have seen the error in a blocking call and are in step."""
        if isinstance(error, PeerRejected):
            self.interrupt(text, error)  # the others may not know
        elif inside or not self.goes_on_after_mismatch or isinstance(error, MismatchAfterRejection):
            self.failure.fail(error)  # as the other members do; what is queued behind it might be matched wrongly

    def reject(self, operation: str, error: BaseException) -> None:
        """Tell the other members that this one does not take part in its next operation, so that none waits for it.

        A member that waits for this one there raises, and thereby breaks the communicator; so do all if this one calls
        again before a member has noticed. Where all members reject the call, none waits, and all may go on. They count
        rejections, so one that passes through several layers, each of which reports it, counts once.
        """
        if is_rejection(error) and is_first_report(error, self._name):
            self._tell_rejection(operation, error)

    def _tell_rejection(self, operation: str, error: BaseException) -> None:
        thread = self._thread
        if thread is not None and not thread.is_current() and thread.unfinished:
            self._queue("rejection", lambda: self._tell_rejection(operation, error))
            return
        with self._lock:
            before, self.wait.rejected = self.wait.rejected, self.wait.rejected + 1
            if self.members is not None and self.failure.error is None:
                self.members.reject(self.number_base + self.statistics.operations, before, operation, error)

    def _reject_now(self, text: str) -> None:
        self.failure.check()
        assert self._fingerprint is not None
        raise RingError(
            f"{self._name}: {text} was called inside {self._fingerprint.text}, by a signal handler? Only set a "
            "variable there, and call collectives from the training loop, where all ranks come to the same place."
        )

    def _run_behind(
        self, fingerprint: Fingerprint, operation: Callable[[Unpack[Ts], Fingerprint], T], *args: Unpack[Ts]
    ) -> T:
        """As `run`, while the thread is busy. An exception before the thread comes to the operation takes it back."""
        work = self._queue(fingerprint.text, lambda: self.run(fingerprint, operation, *args))
        try:
            return work.wait(breaking=False)
        except BaseException as error:
            if not work.done() and not work.cancel():
                self.interrupt(fingerprint.text, error)
            raise

    def start(self, description: str, function: Callable[[], T], repeats: bool = False) -> BackgroundWork[T]:
        """Queue `function` behind everything that was started before, and return at once.

        Args:
            repeats: see `Communicator.start`.
        """
        if self._recovery is not None and not self._recovery.may_start(repeats):
            return BackgroundWork.run_now(description, function, self.interrupt)
        needed_for = current_purpose.text

        def run() -> T:
            try:
                with purpose(needed_for):
                    return function()
            except Exception as error:
                self.reject(description, error)
                raise

        return self._queue(description, run)

    def _queue(self, description: str, function: Callable[[], T]) -> BackgroundWork[T]:
        if self._thread is None:
            self._thread = self.wait.background = QueueThread(self._name)
        try:
            self._thread.check_place(description)
        except RingError as error:
            self.interrupt(description, error)
            raise
        work = BackgroundWork(description, function, self._block_caller, self.interrupt)
        work.thread = self._thread
        self._thread.give(work)
        return work

    def run_synchronously(self, description: str, function: Callable[[], T], at_once: bool = False) -> T:
        """Run `function` in this thread, after everything that was started before, and return its result.

        Any exception breaks the communicator: members may wait for operations that `function` has not come to.

        Args:
            description, function: as for `start`.
            at_once: whether the function is what was started before, and nothing else.

        Raises:
            MembersLost: members are lost, and the others go on; the caller may repeat it.
        """
        thread = self._thread
        if thread is not None and not at_once and thread.unfinished:
            return self.start(description, function).wait()
        with self._lock:
            self.wait.caller_blocked_since = began = time.monotonic()
            try:
                self._synchronous_thread, self._synchronous = threading.get_ident(), description
                return function()
            except MembersLost:
                raise  # the others go on, too
            except BaseException as error:
                self.interrupt(description, error)
                raise
            finally:
                self._synchronous_thread, self._synchronous, self.wait.caller_blocked_since = 0, "", 0.0
                if recorder.on:
                    recorder.record("wait", description, int(began * 1e9), time.monotonic_ns())

    def _block_caller(self, work: BackgroundWork[Any]) -> None:
        """Wait for a work in the caller's thread, and count the time that it blocks the script."""
        began, waited_before = time.monotonic(), self.wait.waited_so_far()
        self.wait.caller_blocked_since = began
        try:
            wait_for_event(work.finished)
        finally:
            self.wait.caller_blocked_since = 0.0
            steps.add_blocked_time(time.monotonic() - began, self.wait.waited_so_far() - waited_before)
            if recorder.on:
                recorder.record("wait", work.description, int(began * 1e9), time.monotonic_ns())

    def interrupt(self, operation: str, cause: BaseException) -> None:
        """Break the communicator on all members, because of an exception of this one; see `Communicator.interrupt`."""
        failure = self.failure
        if failure.error is not None:
            return
        if isinstance(cause, RingError):  # such as TimeoutExceeded, which the others need not run into
            failure.fail(cause)
        else:
            failure.interrupt(operation, cause)
        try:
            if self.members is not None:
                self.members.tell(operation, cause)
            thread = self._thread
            if thread is not None and not (thread.is_current() or self._synchronous_thread == threading.get_ident()):
                thread.wait_until_idle(_LET_GO)  # every wait notices the failure, see `Wait.failure`
        finally:
            if self.members is not None:
                self.members.withdraw(operation, cause)

    def activity(self) -> Activity | None:
        """Return the current or last operation; any thread may call it."""
        fingerprint, began, ended = self._fingerprint, self._began, self._ended
        if fingerprint is None:
            return None
        ended = ended if ended >= began else 0.0
        return Activity(self._name, fingerprint.text, self.wait.part_of, began, ended, self.statistics.operations)

    def close(self) -> None:
        """End the thread once its queue is empty; further calls raise."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self.failure.close()
        self.members = None

    def discard(self) -> None:
        """End the thread and what it works on, without waiting: safe in a finalizer, at any moment in any thread."""
        self.failure.fail(RingError(f"{self._name} is no longer in use."))  # which ends its waits, too
        if self._thread is not None:
            self._thread.end()

    def __del__(self) -> None:
        if self._thread is not None:
            self._thread.end()

    def detach_after_fork(self) -> None:
        """Make every call raise; for a forked child, which has no communication thread."""
        self._thread, self._lock = None, threading.RLock()
        self._synchronous_thread, self._synchronous = 0, ""
        self.failure.detach_after_fork()


class Members(Protocol):
    """How an executor reaches the other members of its communicator."""

    def tell(self, operation: str, cause: BaseException) -> None:
        """Make them raise in their waits and calls: `cause` ended `operation` here."""

    def reject(self, number: int, before: int, operation: str, error: BaseException) -> None:
        """Make those raise `MismatchError` that wait for this one in the operation after the first `number`.

        Args:
            number: operations finished.
            before: rejections since then.
            operation: that this member rejects.
            error: why.
        """

    def withdraw(self, operation: str, cause: BaseException) -> None:
        """Take part in nothing any more, so that no operation completes with this member's memory."""

    def barrier(self, operation: Fingerprint) -> None:
        """Return when all members have called."""

    def agree_on_lost(self, view: int, number: int, dead: Callable[[], AbstractSet[int]]) -> list[int]:
        """As `SharedMemoryBarrier.agree_on_lost`, of members of one host."""


class Recovery(Protocol):
    """What follows when members are lost."""

    def allowed(self, executor: SerialExecutor, operation: F) -> F:
        """The operation; raises `MembersLost` if it is known already that it cannot end."""

    def follow(self, executor: SerialExecutor, error: MembersLost) -> None:
        """Go on without members that were lost in an operation.

        Raises:
            PeerFailed: the job does not go on.
        """

    def may_start(self, repeats: bool) -> bool:
        """Whether a work may run in the background, given whether its caller repeats it."""
