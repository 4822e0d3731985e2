"""Who looks for stalls and deadlocks when rank 0 is lost: the lowest rank that is left, on its own control channel.

In a job that goes on without ranks that are lost, rank 0 may be lost like any other, and the control channel with it.
Little depends on that channel there: all ranks share memory, in which they see how others fail, leave and refuse
operations (core/control/liveness.py). What is left is stall.py, which needs one rank that hears of all long waits.

So the lowest rank that is left makes a new server, and writes its address into its liveness segment. All ranks connect
to it, that rank too: its server stands beside its client, so whatever holds the client goes on with it. Nothing of what
the lost rank knew is needed, since every rank reports the waits that still last. If that rank is lost as well, the next
one does the same.

Timelines and the step breakdown are not continued: what they had so far is lost with rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ring_plugins.core.base import config
from ring_plugins.core.base.log import logger
from ring_plugins.core.control.channel import EVERYONE, Body
from ring_plugins.core.control.client import ControlClient
from ring_plugins.core.control.failure_detector import Peer
from ring_plugins.core.control.liveness import MOST_MEMBERS, LocalPeers
from ring_plugins.core.control.server import ControlServer
from ring_plugins.core.observe.stall import StallAggregator, StallWatch

#: Messages that rank 0 passes on to all ranks (core/control/failure_detector.py).
_PASSED_ON = ("failed", "broken", "exits")


class Succession:
    """A service of the monitor thread of every rank but rank 0, in a job that goes on when ranks are lost.

    Args:
        client: this rank's end of the control channel.
        stalls: reports this rank's long waits on it.
        peers: all ranks.
        membership: host and process of each.
        ranks: returns the world ranks that are left, in order.
    """

    def __init__(
        self,
        client: ControlClient,
        stalls: StallWatch,
        peers: LocalPeers,
        membership: Sequence[Peer],
        ranks: Callable[[], Sequence[int]],
    ) -> None:
        self._client, self._stalls, self._peers = client, stalls, peers
        self._membership, self._ranks = membership, ranks
        self._leader = 0
        self._collector: _Collector | None = None

    def tick(self, now: float) -> None:
        ranks = self._ranks()
        if (leader := min(ranks)) != self._leader:  # the oldest process, in whatever seat
            self._follow(leader)
        if self._collector is not None:
            self._collector.tick(ranks, now)

    def close(self) -> None:
        if self._collector is not None:
            self._collector.server.close()

    def detach_after_fork(self) -> None:
        """In a forked child: close the sockets, which are the parent's."""
        if self._collector is not None:
            self._collector.server.abandon()

    def _follow(self, leader: int) -> None:
        peer = self._peers.own if leader == self._peers.own.rank else self._peers.others.get(leader)
        if peer is self._peers.own and self._collector is None:
            self._collector = _Collector(self._membership)
            peer.announce(json.dumps(self._collector.server.address))
        address = peer.announced if peer is not None else ""
        if address:  # it may not have noticed the loss yet
            self._leader = leader
            self._client.reconnect(json.loads(address))
            self._stalls.report_again()


class _Collector:
    """What a rank does in the place of rank 0."""

    def __init__(self, membership: Sequence[Peer]) -> None:
        self.server = ControlServer(len(membership), most=MOST_MEMBERS)
        for kind in _PASSED_ON:
            self.server.on(kind, self._passing_on(kind))
        self._stalls = StallAggregator(
            self.server, membership, config.STALL_WARNING.get(), config.STALL_ABORT.get(), logger.warning
        )
        self._membership, self._lost = membership, list[int]()

    def tick(self, ranks: Sequence[int], now: float) -> None:
        lost = [rank for rank in range(len(self._membership)) if rank not in ranks]
        if lost != self._lost:
            self._lost = lost
            self.server.tell(0, "ranks_lost", {"ranks": lost})
        self.server.poll(0.0)
        self._stalls.tick(now)
        self.server.poll(0.0)  # sends at once what that has to ask

    def _passing_on(self, kind: str) -> Callable[[int, Body], None]:
        return lambda sender, body: self.server.tell(EVERYONE, kind, body)
