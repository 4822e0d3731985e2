"""What the guard of each rank looks after."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from ring_plugins.core.collectives.ordered import Activity
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.failure import Watch
from ring_plugins.core.guard import Service, say
from ring_plugins.core.observe.stall_desk import StallDesk
from ring_plugins.core.observe.stall_watch import StallWatch
from ring_plugins.core.waiting import seconds_from_environment


def services(channel: Channel, watch: Watch, activities: Callable[[], Iterable[Activity]]) -> list[Service]:
    """Those of this rank.

    Args:
        channel: between the ranks.
        watch: what becomes of the others.
        activities: what this rank did last with each communicator.

    Raises:
        ArgumentError: an environment variable has a value that cannot be used.
    """
    warning = seconds_from_environment("RING_STALL_WARNING", 30.0)
    abort = seconds_from_environment("RING_STALL_ABORT", 1e9) if os.environ.get("RING_STALL_ABORT") else 0.0
    found: list[Service] = [StallWatch(channel, watch, activities)]
    if channel.rank == 0:
        found.append(StallDesk(channel, watch.roster, warning, abort, say))
    return found
