"""What the guard of each rank looks after, beside the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from ring_plugins.core.collectives.ordered import Activity
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.failure import Watch
from ring_plugins.core.guard import Service, say
from ring_plugins.core.observe.advice import Advice
from ring_plugins.core.observe.balance import BalanceDesk, StepReports
from ring_plugins.core.observe.stall_desk import StallDesk
from ring_plugins.core.observe.stall_watch import StallWatch
from ring_plugins.core.observe.steps import steps
from ring_plugins.core.waiting import seconds_from_environment


class Observers:
    """Those of this rank.

    Args:
        channel: between the ranks.
        watch: what becomes of the others.
        activities: what this rank did last with each communicator.

    Attributes:
        services: all of them.
        roster: where the ranks are.
        reports: sends this rank's steps to rank 0.
        balance: on rank 0, the steps of all ranks.

    Raises:
        ArgumentError: an environment variable has a value that cannot be used.
    """

    def __init__(self, channel: Channel, watch: Watch, activities: Callable[[], Iterable[Activity]]) -> None:
        warning = seconds_from_environment("RING_STALL_WARNING", 30.0)
        abort = seconds_from_environment("RING_STALL_ABORT", 1e9) if os.environ.get("RING_STALL_ABORT") else 0.0
        steps.restart()
        self.roster = watch.roster
        self.reports = StepReports(channel, steps)
        self.balance: BalanceDesk | None = None
        self.services: list[Service] = [StallWatch(channel, watch, activities), self.reports]
        if channel.rank == 0:
            self.balance = BalanceDesk(channel, Advice(watch.roster, say).look)
            self.services += [StallDesk(channel, watch.roster, warning, abort, say), self.balance]
