"""Tell the other ranks how this process ends: by an exception, by leaving, or in a forked child.

An uncaught exception ends this process while its peers wait for it in a collective. The hook in
`sys.excepthook` tells them before the interpreter is torn down. If a peer's failure caused the exception, the hook
prints one line instead of a traceback, and waits a moment: the rank that failed first should end the job, so that the
launcher reports its status.

Interpreter exit calls `shutdown`, so that a script need not. A forked child (a data loader's worker) closes
what it inherited silently.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.log import flush_output, logger
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.rendezvous import spawn
from ring_plugins.core.rendezvous.topology import Topology

#: Seconds that a rank waits before it aborts the job because of a peer, so that the rank that failed first ends it.
_AFTER_PEER = 0.2
#: The same where a network was lost: mpirun, as `ring run` starts it, notices that later than the ranks do, and only
#: while it is not waiting for an answer from the lost host.
_AFTER_NETWORK = 4.0


class Job(Protocol):
    """The part of the world that the hooks use."""

    topology: Topology
    failure_detector: FailureDetector | None

    def is_mine(self) -> bool: ...

    def fail(self, error: BaseException) -> None: ...

    def abort(self) -> None: ...

    def detach_after_fork(self) -> None: ...


_failed = False
_installed = False


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
    atexit.register(_at_exit, current, shutdown)
    os.register_at_fork(after_in_child=lambda: _after_fork(current()))
    previous = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        _failed = True
        job = current()
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            # torch.distributed's own hook collects what is printed, to show it when this one returns;
            # but aborting the job may end this process.
            sys.stderr = sys.__stderr__
        if job is None or job.topology.size == 1 or not job.is_mine():
            previous(kind, error, trace)
            return
        cause = consequence(job, error)
        if cause is not None and logger.isEnabledFor(logging.ERROR):
            logger.error(f"rank {job.topology.rank} ends because {cause}")
        else:  # also if the user has silenced the logger: no process ends without a word
            logger.error(f"rank {job.topology.rank} failed:")
            previous(kind, error, trace)
        flush_output()
        job.fail(cause or error)
        if cause is not None:
            detector = job.failure_detector
            time.sleep(_AFTER_NETWORK if detector is not None and detector.has_lost_the_network else _AFTER_PEER)
        job.abort()

    sys.excepthook = uncaught


def consequence(job: Job, error: BaseException) -> PeerFailed | None:
    """The failure of a peer that made this rank raise `error`, or None if the cause is its own.

    Frameworks wrap errors: torch's C++ turns what a collective raised into a RuntimeError with its text.
    """
    if isinstance(error, PeerFailed):
        return error
    if job.failure_detector is None or not job.failure_detector.aborted or PeerFailed.__name__ not in str(error):
        return None
    return job.failure_detector.failure()


def _after_fork(job: Job | None) -> None:
    """Detach a forked child: it may query its parent's rank but is not a member of the job."""
    if job is not None:
        job.detach_after_fork()


def _at_exit(current: Callable[[], Job | None], shutdown: Callable[[], None]) -> None:
    job = current()
    if job is not None and not job.is_mine():
        return
    shutdown()
    status = spawn.wait_for_children(_failed)
    if status and not _failed:
        logging.shutdown()  # os._exit skips it, and the user's handlers may hold records
        flush_output()
        os._exit(status)
