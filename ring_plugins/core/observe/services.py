"""What the guard of each rank looks after, beside the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ring_plugins.core.collectives.ordered import Activity
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.failure import Watch
from ring_plugins.core.guard import Service, say
from ring_plugins.core.observe.advice import Advice
from ring_plugins.core.observe.balance import BalanceDesk, StepReports
from ring_plugins.core.observe.recorder import recorder
from ring_plugins.core.observe.stall_desk import StallDesk
from ring_plugins.core.observe.stall_watch import StallWatch
from ring_plugins.core.observe.steps import steps
from ring_plugins.core.observe.timeline import TimelineDesk, TimelineReports
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
        balance, timeline: on rank 0, the steps of all ranks, and what they record.

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
        self.timeline: TimelineDesk | None = None
        own, first = watch.roster[channel.rank], watch.roster[0]
        self._spans = TimelineReports(channel, own.domain == first.domain)
        self.services: list[Service] = [StallWatch(channel, watch, activities), self.reports, self._spans]
        if channel.rank == 0:
            self.balance = BalanceDesk(channel, Advice(watch.roster, say).look)
            self.timeline = TimelineDesk(channel, watch.roster)
            self.services += [StallDesk(channel, watch.roster, warning, abort, say), self.balance, self.timeline]
            directory = os.environ.get("RING_TIMELINE", "")
            if directory:
                self.timeline.start(Path(directory))

    def last_words(self) -> None:
        """Send what would be lost with this process; any thread may call it."""
        if recorder.on:
            self._spans.send()
