"""The job that is observed: its observers, and the line that rank 0 prints once when training begins."""

from __future__ import annotations

import weakref

from ring_plugins.core.base.log import logger
from ring_plugins.core.job import World
from ring_plugins.core.observe.observers import Observers
from ring_plugins.core.world import current, is_initialized


def current_observers() -> Observers | None:
    """The observing services of this process, None if there is no job of several ranks."""
    return current().observers if is_initialized() else None


_announced: weakref.WeakSet[World] = weakref.WeakSet()


def announce_training() -> None:
    """Say on rank 0, once per job, how many ranks train together, as Lightning does; nothing for one rank."""
    if not is_initialized() or current().topology.size == 1 or current().is_joining or current() in _announced:
        return
    _announced.add(current())
    if current().topology.rank == 0:
        logger.info(f"training on {current().summary}")
