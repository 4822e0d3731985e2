"""See to it that the other ranks learn how this process ends."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.log import logger
from ring_plugins.core.rendezvous import spawn as grow

if TYPE_CHECKING:
    from ring_plugins.core.world import World

#: Seconds in which mpirun, as `ring run` starts it, finds out that a network is lost, after the ranks have.
_LAUNCHER_LOOKS = 4.0
_failed = False
_installed = False


def install(current: Callable[[], World | None], shutdown: Callable[[], None]) -> None:
    """Hook the ends of this process, once.

    Args:
        current: the world that this process, or the one it was forked from, is part of.
        shutdown: leaves it.
    """
    global _installed
    if _installed:
        return
    _installed = True
    atexit.register(_at_exit, current, shutdown)
    os.register_at_fork(after_in_child=lambda: _forked(current()))
    previous = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        _failed = True
        world = current()
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            # torch.distributed's own hook collects what is printed, to show it when this one returns;
            # but ending the job may end this process.
            sys.stderr = sys.__stderr__
        if world is None or world.topology.size == 1 or not world.is_mine():
            previous(kind, error, trace)
            return
        cause = consequence(world, error)
        if cause is not None:
            logger.error(f"rank {world.topology.rank} ends because {cause}")
        else:
            logger.error(f"rank {world.topology.rank} failed:")
            previous(kind, error, trace)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        world.fail(cause or error)
        if cause is not None:
            # Let the rank that failed first end the job. When a network is lost, let the launcher find that out: once
            # it has sent its other half word that a rank ended, it waits for the answer.
            time.sleep(
                _LAUNCHER_LOOKS
                if world.failure_detector is not None and world.failure_detector.has_lost_the_network
                else 0.2
            )
        world.abort()

    sys.excepthook = uncaught


def consequence(world: World, error: BaseException) -> PeerFailed | None:
    """The failure of a peer that made this rank raise `error`, or None if the cause is its own.

    Frameworks wrap errors: torch's C++ turns what a collective raised into a RuntimeError with its text.
    """
    if isinstance(error, PeerFailed):
        return error
    if world.failure_detector is None or not world.failure_detector.told or PeerFailed.__name__ not in str(error):
        return None
    return world.failure_detector.failure()


def _forked(world: World | None) -> None:
    """A forked child can read who its parent is among the ranks; it is none itself."""
    if world is not None:
        world.leave_to_parent()


def _at_exit(current: Callable[[], World | None], shutdown: Callable[[], None]) -> None:
    world = current()
    if world is not None and not world.is_mine():
        return
    shutdown()
    status = grow.wait_for_children(_failed)
    if status and not _failed:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
