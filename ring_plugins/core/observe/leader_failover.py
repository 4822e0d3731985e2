"""Who looks for stalls and deadlocks when rank 0 is lost: the lowest rank that is left, on its own control channel.

In a job that goes on without ranks that are lost, rank 0 may be lost like any other, and the control channel with it.
Little depends on that channel there: how others fail, leave and reject operations travels over connections among all
ranks (core/control/mesh.py). What is left is stall.py, which needs one rank that hears of all long waits.

So the lowest rank that is left makes a new server, and announces its address over the connections that all ranks have
to each other (core/control/mesh.py). All ranks connect to it, that rank
too: its server stands beside its client, so whatever holds the client goes on with it. Nothing of what the lost rank
knew is needed, since every rank reports the waits that still last. If that rank is lost as well, the next
one does the same.

Timelines and the step breakdown are not continued: what they had so far is lost with rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ring_plugins.core.base import config
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.member import Members
from ring_plugins.core.control.channel import EVERYONE, Body
from ring_plugins.core.control.client import ControlClient
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.server import ControlServer
from ring_plugins.core.observe.stall import StallAggregator, StallWatch

#: Messages that rank 0 passes on to all ranks (core/control/failure_detector.py).
_PASSED_ON = ("failed", "broken", "exits")


class LeaderFailover:
    """A service of the monitor thread of every rank but rank 0, in a job that goes on when ranks are lost.

    Args:
        client: this rank's end of the control channel.
        stalls: reports this rank's long waits on it.
        members: of the job.
        mesh: knows where one of them listens in the place of rank 0.
        addresses: at which other hosts reach this one; empty if there are none.
    """

    def __init__(
        self,
        client: ControlClient,
        stalls: StallWatch,
        members: Members,
        mesh: Mesh,
        addresses: Sequence[str] = (),
    ) -> None:
        self._client, self._stalls, self._mesh = client, stalls, mesh
        self._members, self._addresses = members, addresses
        self._leader = 0
        self._collector: _Collector | None = None

    def tick(self, now: float) -> None:
        if (leader := min(self._members.ranks)) != self._leader:  # the oldest process, in whatever slot
            self._follow(leader)
        if self._collector is not None:
            self._collector.tick(now)

    def close(self) -> None:
        if self._collector is not None:
            self._collector.server.close()

    def detach_after_fork(self) -> None:
        """In a forked child: close the sockets, which are the parent's."""
        if self._collector is not None:
            self._collector.server.abandon()

    def _follow(self, leader: int) -> None:
        if leader == self._client.rank and self._collector is None:
            self._collector = _Collector(self._members, self._addresses)
            self._mesh.announce(self._collector.server.address)
        address = self._mesh.announced.get(leader)
        if address is not None:  # it may not have noticed the loss yet
            self._leader = leader
            self._client.reconnect(address, self._members.is_near(leader))
            self._stalls.report_again()


class _Collector:
    """What a rank does in the place of rank 0."""

    def __init__(self, members: Members, addresses: Sequence[str]) -> None:
        self.server = ControlServer(len(members.known), addresses, most=MOST_MEMBERS)
        for kind in _PASSED_ON:
            self.server.on(kind, self._passing_on(kind))
        self._stalls = StallAggregator(
            self.server, members, config.STALL_WARNING.get(), config.STALL_ABORT.get(), logger.warning
        )
        self._members, self._lost = members, list[int]()

    def tick(self, now: float) -> None:
        lost = [rank for rank in self._members.known if rank not in self._members.ranks]
        if lost != self._lost:
            self._lost = lost
            self.server.tell(0, "ranks_lost", {"ranks": lost})
        self.server.poll(0.0)
        self._stalls.tick(now)
        self.server.poll(0.0)  # sends at once what that has to ask

    def _passing_on(self, kind: str) -> Callable[[int, Body], None]:
        return lambda sender, body: self.server.tell(EVERYONE, kind, body)
