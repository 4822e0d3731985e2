"""Who looks for stalls and deadlocks when rank 0 is lost: the lowest rank that is left, the channel's `leader`.

In a job that goes on without ranks that are lost, rank 0 may be lost like any other. Little depends on it there: how
others fail, leave and reject operations travels from each rank to all others (core/control/mesh.py). What is left is
stall.py, which needs one rank that hears of all long waits. So each rank reports its long waits to the lowest rank that
it knows to be left, again if that changes, and each can take such reports, also before it knows of the loss itself.
Nothing of what the lost rank knew is needed, since every rank reports the waits that still last.

Timelines and the step breakdown are not continued: what they had so far is lost with rank 0.
"""

from __future__ import annotations

from ring_plugins.core.base import config
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.member import Members
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.observe.stall import StallAggregator, StallWatch


class LeaderFailover:
    """A service of the monitor thread of every rank but rank 0, in a job that goes on when ranks are lost.

    Args:
        channel: between the ranks.
        stalls: reports this rank's long waits.
        members: of the job.
    """

    def __init__(self, channel: Channel, stalls: StallWatch, members: Members) -> None:
        self._channel, self._stalls, self._members = channel, stalls, members
        self._all_stalls = StallAggregator(
            channel, members, config.STALL_WARNING.get(), config.STALL_ABORT.get(), logger.warning
        )

    def tick(self, now: float) -> None:
        if (leader := min(self._members.ranks)) != self._channel.leader:  # the oldest process, in whatever slot
            self._channel.leader = leader
            self._stalls.report_again()
        if leader == self._channel.rank:
            self._all_stalls.tick(now)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
