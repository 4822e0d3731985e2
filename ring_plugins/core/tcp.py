"""The plane over plain sockets: bytes between hosts without MPI and without any framework.

Each pair of ranks has one connection a tag, so a stream carries one lane's messages in their order and nothing else: no
framing, no copy, and no lane ever waits for another's data. Bytes go straight between the sockets and numpy memory.
Progress is made by whoever asks `done()`, as in MPI; between two looks the kernel's buffers go on sending and
receiving.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ring_plugins.core.errors import ArgumentError, PeerFailed, RingError
from ring_plugins.core.lines import Lines, Link
from ring_plugins.core.plane import Bytes
from ring_plugins.core.switchboard import Peer, Switchboard
from ring_plugins.core.waiting import seconds_from_environment


class _TcpPending:
    """One exchange: done when its links have moved as many bytes as they had been given by then."""

    def __init__(self, plane: TcpPlane, lines: Lines, links: Sequence[Link]) -> None:
        self._plane, self._lines = plane, lines
        self._left = [(link, link.to_send, link.to_receive) for link in links]

    def done(self) -> bool:
        if self._is_left():
            try:
                self._plane.move(self._lines)
            except PeerFailed:
                if self._is_left():
                    raise
            return not self._is_left()
        return True

    def _is_left(self) -> bool:
        if self._left:
            self._left = [mark for mark in self._left if mark[0].sent < mark[1] or mark[0].received < mark[2]]
        return bool(self._left)

    def nap(self, seconds: float) -> None:
        self._lines.sleep({link: received for link, _, received in self._left}, seconds)


class _Connecting:
    """Connections being made with ranks that do the same now: what keeps them apart is found here and not later."""

    def __init__(self, switchboard: Switchboard, links: Sequence[Link]) -> None:
        self._switchboard, self._links = switchboard, links
        self._end = time.monotonic() + seconds_from_environment("RING_START_TIMEOUT", 300.0)

    def done(self) -> bool:
        waiting = [link.peer for link in self._links if not link.is_connected()]
        if waiting and time.monotonic() > self._end:
            self._switchboard.say_who_does_not_come(waiting)
        return not waiting

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


class TcpPlane:
    """A `Plane` over TCP.

    Args:
        rank: of this process.
        peers: where every rank listens, in rank order; this rank's own among them.
        switchboard: makes and takes the connections.
    """

    name = "tcp"

    def __init__(self, rank: int, peers: Sequence[Peer], switchboard: Switchboard) -> None:
        self.rank, self.size = rank, len(peers)
        self._peers = tuple(peers)
        self._switchboard = switchboard
        self._lines: dict[int, Lines] = {}
        self._closed = False

    def connect(self, ranks: Sequence[int], tag: int) -> _Connecting:
        return _Connecting(self._switchboard, [self._link(peer, tag) for peer in ranks if peer != self.rank])

    def exchange(
        self, outgoing: Sequence[tuple[int, Bytes]], incoming: Sequence[tuple[int, Bytes]], tag: int
    ) -> _TcpPending:
        if self._closed:
            raise RingError(f"the TCP plane of rank {self.rank} has been closed.")
        links = []
        for peer, data in incoming:
            if data.size:
                links.append(link := self._link(peer, tag))
                link.receive(data)
        for peer, data in outgoing:
            if data.size:
                links.append(link := self._link(peer, tag))
                link.send(data)
        lines = self._lines.setdefault(tag, Lines())
        for link in links:
            if link not in lines.busy:
                lines.busy.append(link)
        # Nothing moves yet, so that a header and the data after it leave together.
        return _TcpPending(self, lines, links if len(links) == 1 else list(dict.fromkeys(links)))

    def _link(self, peer: int, tag: int) -> Link:
        lines = self._lines.setdefault(tag, Lines())
        link = lines.links.get(peer)
        if link is None:
            if not 0 <= peer < self.size or peer == self.rank:
                raise ArgumentError(f"rank {self.rank} was asked to exchange with rank {peer} of {self.size}.")
            link = lines.links[peer] = Link(self._switchboard, peer, tag)
        return link

    def move(self, lines: Lines) -> None:
        """Let every busy link of a tag send and receive what it can.

        Raises:
            PeerFailed: a connection is lost.
        """
        finished = False
        for link in lines.busy:
            try:
                link.move()
            except (OSError, EOFError) as error:
                raise self._lost(link.peer, error) from error
            finished = finished or not link.is_busy()
        if finished:
            lines.busy = [link for link in lines.busy if link.is_busy()]

    def progress(self, tag: int) -> None:
        lines = self._lines.get(tag)
        if lines is not None and lines.busy:
            self.move(lines)

    def disconnect(self, tag: int) -> None:
        lines = self._lines.pop(tag, None)
        if lines is not None:
            lines.close()
        self._switchboard.hang_up(tag)

    def _lost(self, peer: int, error: Exception) -> PeerFailed:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return PeerFailed(
            f"rank {self.rank} lost its connection to rank {peer} on {self._peers[peer].host} ({reason}). It ended, or "
            f"its host did; look for the error that rank {peer} printed.",
            peer,
        )

    def close(self) -> None:
        """Close all connections; call after the last exchange is done on all ranks."""
        self._closed = True
        self._switchboard.close()
        for tag in list(self._lines):
            self.disconnect(tag)
