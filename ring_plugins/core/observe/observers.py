"""Puts together what observes a job: reports of stalls, the step breakdown, the timeline, the live view.

Every rank has the parts that report; rank 0 also has those that collect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ring_plugins.core.base import config
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Activity
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.monitor import Service
from ring_plugins.core.observe import metrics
from ring_plugins.core.observe.live import LiveView, Vitals
from ring_plugins.core.observe.stall import StallAggregator, StallWatch
from ring_plugins.core.observe.step_breakdown import StepAggregator, StepReporter
from ring_plugins.core.observe.timeline import TimelineAggregator, TimelineReporter
from ring_plugins.core.trace.steps import steps


class Observers:
    """The observing services of this rank, which the monitor thread calls.

    Args:
        channel: between the ranks.
        failure_detector: knows which ranks have failed or left.
        activities: returns the last operation of this rank in each communicator.
        records: whether rank 0 writes a timeline of the whole job.
        is_part: whether this process has another job beside it, which shows the ranks of all parts.

    Attributes:
        services: all of them, for the monitor thread.
        members: of the job.
        stalls: reports this rank's long waits to rank 0.
        steps: sends this rank's steps to rank 0.
        spans: sends this rank's part of a timeline there.
        live: shows the job to whoever watches.
        all_steps, timeline, all_stalls: on rank 0, the steps, the timeline and the long waits of all ranks.

    Raises:
        ArgumentError: an environment variable has an invalid value.
    """

    def __init__(
        self,
        channel: Channel,
        failure_detector: FailureDetector,
        activities: Callable[[], Iterable[Activity]],
        records: bool = False,
        is_part: bool = False,
    ) -> None:
        warning, abort = config.STALL_WARNING.get(), config.STALL_ABORT.get()
        steps.restart()
        self.members = members = failure_detector.members
        self.steps = StepReporter(channel, steps)
        self.all_steps: StepAggregator | None = None
        self.timeline: TimelineAggregator | None = None
        self.all_stalls: StallAggregator | None = None
        self.spans = TimelineReporter(channel, members.is_near(0))
        self.stalls = StallWatch(channel, failure_detector, activities)
        self.services: list[Service] = [self.stalls, self.steps, self.spans]
        if config.METRICS.get() is not None:
            metrics.check()
        self.live = LiveView(channel, members)
        self.services += [] if is_part else [Vitals(channel, steps), self.live]
        if channel.rank == 0:
            self.all_steps = StepAggregator(channel, members, logger.warning)
            self.timeline = TimelineAggregator(channel, members)
            self.all_stalls = StallAggregator(channel, members, warning, abort, logger.warning)
            self.services += [self.all_stalls, self.all_steps, self.timeline]
            directory = config.TIMELINE.get()
            if directory:
                self.timeline.start(Path(directory))
        if records:
            self.spans.start()  # not only when rank 0's message arrives, which may be after the first steps
