"""Tell the other ranks how this process ends: by an exception, by leaving, or in a forked child.

An uncaught exception ends this process while its peers wait for it in a collective. The hook in
`sys.excepthook` tells them before the interpreter is torn down. If a peer's failure caused the exception, the hook
prints one line instead of a traceback, and waits a moment: the rank that failed first should end the job, so that the
launcher reports its status. Signal handlers may raise while it does so. Whatever they interrupt, the others are told:
by a thread of its own, which no handler can interrupt, and at interpreter exit at the latest.

`os._exit` with a failure's status tells them, too. Without that they would take the rank for one that was killed.

A helper thread that dies ends the process at once: the script may be waiting for something that only this thread does.

Interpreter exit calls `shutdown`, so that a script need not. A forked child (a data loader's worker) closes
what it inherited silently.
"""

from __future__ import annotations

import _thread
import atexit
import builtins
import contextlib
import functools
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol

from ring_plugins.core.base.errors import DeadlockError, MismatchError, PeerFailed, PeerLeft
from ring_plugins.core.base.log import flush_output, logger
from ring_plugins.core.base.member import Topology
from ring_plugins.core.base.threads import HelperThread, set_on_death, until
from ring_plugins.core.control.failure_detector import FailureDetector, ThreadDied, summary
from ring_plugins.core.control.wait import PeerRejected
from ring_plugins.core.linux.process import is_failure
from ring_plugins.core.rendezvous import spawn

#: Seconds that a rank waits before it aborts the job because of a peer, so that the rank that failed first ends it.
_AFTER_PEER = 0.2
#: The same where a network was lost: mpirun, as `ring run` starts it, notices that later than the ranks do, and only
#: while it is not waiting for an answer from the lost host.
_AFTER_NETWORK = 4.0
#: Seconds for the launcher to end the job; where MPI is broken too, the call may never return.
_ABORT = 2.0
#: The thread that asks it, as in control/monitor.py.
_ABORTING = "ring:abort"

#: How the failure detector describes a process that ended without a word.
_DIED = " died without reporting an error"
#: And one that left while others wait for it.
_LEFT = "has left the job, but"
#: Seconds for which a failed rank waits for another rank to report the same error.
_SAME_ERROR = 0.3
#: Seconds that it leaves to that rank to print the traceback, if failures were reported before anything was printed.
_PRINTING = 1.0
#: Seconds that it takes at most to tell the others, who may be stopped, and how often handlers may interrupt that.
_SHIELDED, _TRIES = 2.0, 20


class Job(Protocol):
    """The part of the world that the hooks use."""

    world_rank: int
    failure_detector: FailureDetector | None

    @property
    def topology(self) -> Topology: ...

    def is_mine(self) -> bool: ...

    def operations(self) -> int: ...

    def fail(self, error: BaseException) -> None: ...

    def leave(self, status: int) -> None: ...

    def status_after(self, error: BaseException) -> int: ...

    def abort(self, status: int = 1) -> None: ...

    def close(self) -> None: ...

    def detach_after_fork(self) -> None: ...


_failed = False
#: The exit status of the job if it failed because of a peer, 1 if that is not known; else 0.
_followed = 0
#: Whether the hook has said all of it: a signal's handler that raises may end it before, or before it has begun.
_told = False
_installed = False
#: The status of the last call of `sys.exit` by the main thread, and how many operations had been finished by then.
_exit: tuple[int, int] = (0, 0)


def install(current: Callable[[], Job | None], shutdown: Callable[[], None]) -> None:
    """Install the hooks of this process, once.

    Args:
        current: returns the world that this process, or the process it was forked from, belongs to.
        shutdown: leaves it.
    """
    global _installed
    if _installed:
        return
    _installed = True
    for _ in range(2):  # the second does what is left to do if a signal's handler raises in the first
        atexit.register(_at_exit, current, shutdown)
    os.register_at_fork(after_in_child=lambda: _after_fork(current()))
    previous = sys.excepthook
    sys.exit = _noting_exit(sys.exit, current)
    os._exit = _telling_exit(os._exit, current)  # type: ignore[assignment]  # mypy takes it for a constant
    _note_calls_of_exit_and_quit(current)
    set_on_death(lambda thread, error: _end_with_thread(current(), thread, error))

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed, _told
        _failed = True
        job = current()
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            # torch.distributed's own hook collects what is printed, to show it when this one returns;
            # but aborting the job may end this process.
            sys.stderr = sys.__stderr__
        if job is None or job.topology.size == 1 or not job.is_mine():
            previous(kind, error, trace)
            return
        rank = job.world_rank
        is_reported = job.failure_detector is not None and job.failure_detector.failed
        cause, other = None, None
        try:
            cause = consequence(job, error)
            if cause is not None:
                cause = _with_exit_status(cause)
            if cause is not None and logger.isEnabledFor(logging.ERROR):
                logger.error(f"rank {rank} ends because {cause}")
            elif isinstance(error, KeyboardInterrupt) and job.topology.rank > 0:
                time.sleep(_SAME_ERROR)  # Ctrl-C reaches all ranks, and rank 0 shows it before the job ends
            elif cause is None and (other := _peer_with_same_error(job, error)) is not None:
                logger.error(f"rank {rank} failed at the same place as rank {other}: {summary(error)}")
            else:  # also if the user has silenced the logger: no process ends without a word
                logger.error(f"rank {rank} failed:")
                previous(kind, error, trace)
            flush_output()
        finally:  # a signal's handler may have raised; Python shows both exceptions then
            _shielded(lambda: job.fail(cause or error))
        shared = (MismatchError.__name__, DeadlockError.__name__)  # perhaps in the text of a framework's own error
        if cause is None and other is None and any(name in summary(error) for name in shared):
            time.sleep(_PRINTING if is_reported else _SAME_ERROR)  # the others raise it elsewhere, and print that, too
        if cause is not None:
            detector = job.failure_detector
            time.sleep(_AFTER_NETWORK if detector is not None and detector.facts.has_lost_the_network else _AFTER_PEER)
        elif other is not None and is_reported:
            time.sleep(_PRINTING)
        _told = True
        _abort(job, error, cause)

    sys.excepthook = uncaught


def _abort(job: Job, error: BaseException, cause: PeerFailed | None) -> None:
    global _followed
    status = job.status_after(cause or error)
    _followed = status if cause is not None else 0
    job.abort(status)


def exit_status() -> int:
    """The status of the last `sys.exit`, for a process that ends by it; 0 if that was not called."""
    return _exit[0]


def _with_exit_status(failure: PeerFailed) -> PeerFailed:
    """The failure, with the exit status added if the rank did not tell it and this process is its parent."""
    if isinstance(failure, PeerLeft):  # by `raise SystemExit(3)`, if it has a status
        status, waits = spawn.status_of_child(failure.rank), str(failure).partition(". ")[0]
        how = f"ended with exit status {status}, while"
        return PeerFailed(f"{waits.replace(_LEFT, how)}.", failure.rank) if status else failure
    where, died, _ = str(failure).partition(_DIED)
    end = spawn.end_of_child(failure.rank) if died else None
    return failure if end is None else PeerFailed(f"{where}{_DIED}: it {end}.", failure.rank)


def _peer_with_same_error(job: Job, error: BaseException) -> int | None:
    """Another rank that failed by an exception of the same type at the same place, None if there is none.

    A mistake in a script makes all ranks fail at about the same time. One traceback is enough, so every rank but 0
    gives the others a moment to report theirs.

    A rank reports its failure after it has printed the traceback, so the others may rely on it. But Lightning's
    strategy reports as soon as it sees the exception. Each rank then finds the others' reports before any has printed,
    and only a lower rank may be relied on.
    """
    detector = job.failure_detector
    if detector is None:
        return None
    highest = job.world_rank if detector.failed else job.topology.size
    is_told = lambda: (failure := detector.failure()) is not None and failure.rank <= highest  # noqa: E731
    until(is_told, _SAME_ERROR if job.topology.rank else 0.0)
    own, failure = summary(error), detector.failure()
    prefix, _, other = str(failure or "").partition(" failed: ")
    if failure is None or prefix != f"rank {failure.rank}" or failure.rank == job.world_rank or failure.rank > highest:
        return None
    (theirs, called), (ours, ours_called) = _place(other), _place(own)
    return failure.rank if theirs == ours and (called == ours_called or not called or not ours_called) else None


def _place(summary: str) -> tuple[tuple[str, str], str]:
    """An exception's type and line, and from where that was called: unknown if it was reported before it got there."""
    line, _, called = summary.rpartition(" (")[2].rstrip(")").partition(", called from ")
    return (summary.partition(":")[0], line), called


def _noting_exit(original: Callable[..., NoReturn], current: Callable[[], Job | None]) -> Callable[..., NoReturn]:
    """Wrap `sys.exit` to remember the status, which Python tells neither `sys.excepthook` nor exit hooks."""

    @functools.wraps(original)
    def noted(*status: object) -> NoReturn:
        if len(status) < 2:
            _note_exit(status[0] if status else None, current)
        original(*status)

    return noted


def _note_calls_of_exit_and_quit(current: Callable[[], Job | None]) -> None:
    """The same for the functions `exit` and `quit`, which raise SystemExit by themselves.

    A script's own `raise SystemExit(3)` passes through no code that could note it, and the interpreter has forgotten it
    when it calls what is registered with atexit. Peers take it for an orderly end.
    """
    kind: Any = type(getattr(builtins, "exit", None))
    if kind.__module__ != "_sitebuiltins":  # the interpreter runs without site, or a shell has its own
        return
    original = kind.__call__

    @functools.wraps(original)
    def noted(self: object, code: object = None) -> None:
        _note_exit(code, current)
        original(self, code)

    kind.__call__ = noted


def _telling_exit(original: Callable[[int], NoReturn], current: Callable[[], Job | None]) -> Callable[[int], NoReturn]:
    """Wrap `os._exit` to tell the others of a status that means a failure."""

    @functools.wraps(original)
    def telling(status: int) -> NoReturn:
        try:
            job = current()
            if job is not None and job.is_mine() and isinstance(status, int) and is_failure(status & 0xFF):
                how = f"ended with exit status {status & 0xFF} without an exception: it called os._exit."
                failure = PeerFailed(f"rank {job.world_rank} (process {os.getpid()}) {how}", job.world_rank)

                def tell() -> None:
                    job.leave(status & 0xFF)
                    job.fail(failure)

                _shielded(tell)
        finally:
            original(status)

    return telling


def _shielded(function: Callable[[], object]) -> None:
    """Call a function on another thread, where no signal handler runs; what they raise meanwhile here is dropped.

    Not with `threading.Thread`: one that is interrupted as it starts its thread may leave that unable to run.
    """
    lock, has_begun, is_done = threading.Lock(), threading.Event(), threading.Event()

    def call() -> None:
        has_begun.set()
        with lock, contextlib.suppress(Exception):
            if not is_done.is_set():
                function()
        is_done.set()

    for _ in range(_TRIES):
        try:
            if not has_begun.is_set():
                _thread.start_new_thread(call, ())
            is_done.wait(_SHIELDED)
            return
        except BaseException:  # a handler's; or Python, which is about to end, starts no threads any more
            pass
    call()


def _note_exit(status: object, current: Callable[[], Job | None]) -> None:
    global _exit
    if threading.current_thread() is threading.main_thread():
        job = current()
        code = 0 if status is None else int(status) & 0xFF if isinstance(status, int) else 1
        _exit = code, job.operations() if job is not None else 0


def _end_with_thread(job: Job | None, thread: str, error: BaseException) -> bool:
    """End this process, and the job with it, because a helper thread has died; returns False outside a job."""
    if job is None or not job.is_mine():
        return False
    rank = job.world_rank
    try:
        logger.error(f"rank {rank} failed: its thread {thread} died:")
        sys.__excepthook__(type(error), error, error.__traceback__)
        flush_output()
        job.fail(ThreadDied(f"its thread {thread} died: {summary(error)}"))
        if thread != _ABORTING:  # else the next one would die, too
            aborting = HelperThread(job.abort, _ABORTING)
            aborting.start()
            aborting.join(_ABORT)
    finally:  # whatever else is broken
        os._exit(1)


def consequence(job: Job, error: BaseException) -> PeerFailed | None:
    """The failure of a peer that made this rank raise `error`, or None if the cause is its own.

    Frameworks wrap errors: torch's C++ turns what a collective raised into a RuntimeError with its text.
    """
    if isinstance(error, PeerFailed):
        return error
    if isinstance(error, PeerRejected) and job.failure_detector is not None:
        detector = job.failure_detector
        until(
            lambda: detector.failure() or detector.exited(), _SAME_ERROR
        )  # the rank that rejected probably ends by it
        failure = detector.failure()
        for rank, status in detector.exited().items() if failure is None else ():
            return PeerFailed(f"rank {rank} ended with exit status {status} (sys.exit).", rank)
        return failure
    if job.failure_detector is None or not job.failure_detector.aborted or PeerFailed.__name__ not in summary(error):
        return None
    return job.failure_detector.failure()


def _after_fork(job: Job | None) -> None:
    """Detach a forked child: it may query its parent's rank but is not a member of the job."""
    if job is not None:
        job.detach_after_fork()


def _at_exit(current: Callable[[], Job | None], shutdown: Callable[[], None]) -> None:
    global _failed
    job = current()
    if job is not None and not job.is_mine():
        return
    error = getattr(sys, "last_value", None)  # which Python sets before it calls the hook
    if job is not None and error is not None and not _told and job.topology.size > 1 and not hasattr(sys, "ps1"):
        _failed = True
        _shielded(lambda: job.fail(error))
        job.abort()
    own, operations = _exit
    if job is None or _failed or (own and job.operations() != operations):  # it failed, or caught SystemExit
        own = 0
    if job is not None and own:
        _shielded(lambda: job.leave(own))
    try:
        shutdown()
    finally:  # a signal's handler may have raised before this rank has begun to leave
        if job is not None:
            job.close()
    status = _wait_for_children()
    if status and (_followed or not _failed):
        logging.shutdown()  # os._exit skips it, and the user's handlers may hold records
        flush_output()
        os._exit(own or (_followed if _followed > 1 else status))  # own: the others fail because this rank has left


def _wait_for_children() -> int:
    for _ in range(_TRIES):
        try:
            return spawn.wait_for_children(_failed)
        except KeyboardInterrupt:  # the others have got it, too, and end
            break
        except Exception:  # a signal handler's
            pass
    return spawn.wait_for_children(failed=True) or 128 + signal.SIGINT
