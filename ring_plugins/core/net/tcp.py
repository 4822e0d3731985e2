"""The plane over plain sockets: bytes between hosts without MPI and without any framework.

Each pair of ranks has one connection a tag, so a stream carries one lane's messages in their order and nothing else: no
framing, no copy, and no lane ever waits for another's data. Bytes go straight between the sockets and numpy memory.
Progress is made by whoever asks `done()`, as in MPI; between two looks the kernel's buffers go on sending and
receiving.

Sockets between all ranks of a job, once they know each other's hosts.

Sockets between ranks, and what is still to be moved over each: bytes, without a word about operations.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, PeerFailed, RingError
from ring_plugins.core.base.types import Bytes
from ring_plugins.core.net.listener import Listener, Peer


def open_transport(
    rank: int, hosts: Sequence[str], addresses: Sequence[str], gather: Callable[[Any], list[Any]]
) -> TcpTransport:
    """Listen, and learn where the others do; all ranks call.

    Args:
        rank: of this process.
        hosts: the ranks' hosts, for texts.
        addresses: to listen on, in rank order.
        gather: everyone's payload in rank order.
    """
    patience = min(15.0, config.START_TIMEOUT.get())
    listener = Listener(addresses[rank], patience)
    try:
        whole = gather([listener.port, secrets.token_hex(32) if rank == 0 else ""])
        ports, secret = [int(item[0]) for item in whole], str(whole[0][1])
        peers = [Peer(*where) for where in zip(hosts, addresses, ports, strict=True)]
        listener.open(rank, peers, secret)
    except BaseException:
        listener.close()
        raise
    return TcpTransport(rank, peers, listener)


#: Parts handed to the kernel in one call; a header and its data go out together.
_TOGETHER = 8
#: Bytes for which it is worth being woken, if so many are awaited: what 10 Gbit/s brings in 400 µs.
_ENOUGH = 512 * 1024
#: Milliseconds to sleep at most where nothing arrives.
_DOZE = 10
#: Seconds for which a connection that is closed in the middle of an operation reads on.
_LINGER = 2.0


class Link:
    """The connection with one peer for one tag, and what is still to be moved over it.

    Attributes:
        to_send, to_receive: bytes given so far, in all.
        sent, received: bytes moved so far.
    """

    def __init__(self, listener: Listener, peer: int, tag: int) -> None:
        self.peer, self._tag, self._listener = peer, tag, listener
        self.socket: socket.socket | None = None
        self.to_send = self.to_receive = self.sent = self.received = 0
        self._enough = 1
        self._outgoing: deque[memoryview] = deque()
        self._incoming: deque[memoryview] = deque()

    def is_connected(self) -> bool:
        """Whether bytes can move: the lower rank connects, the higher one is connected to."""
        if self.socket is None:
            self.socket = self._listener.connection(self.peer, self._tag)
        return self.socket is not None

    def send(self, data: Bytes) -> None:
        self._outgoing.append(memoryview(data))
        self.to_send += data.size

    def receive(self, data: Bytes) -> None:
        self._incoming.append(memoryview(data))
        self.to_receive += data.size

    def is_busy(self) -> bool:
        return self.sent < self.to_send or self.received < self.to_receive

    def wants(self, awaited: int = 0) -> int:
        """What to poll the socket for, which is told to wake nobody for less than is worth it.

        Args:
            awaited: bytes received in all, for which someone waits; 0 if nobody does.
        """
        assert self.socket is not None
        enough = max(1, min((awaited if awaited > self.received else self.to_receive) - self.received, _ENOUGH))
        if enough != self._enough:
            self._enough = enough
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
        return (select.POLLOUT if self._outgoing else 0) | (select.POLLIN if self._incoming else 0)

    def move(self) -> None:
        """Send and receive what can be moved at once.

        Raises:
            OSError: the connection is broken, EOFError: the peer has closed it.
        """
        if self.socket is None and not self.is_connected():
            return
        try:
            if self._outgoing:
                self._push()
        finally:  # what a peer said before it ended can still be read
            if self._incoming:
                self._pull()

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    # Less than was asked for means that the kernel has no room, or no more: asking again would only fail.

    def _push(self) -> None:
        assert self.socket is not None
        parts, there_was_room = self._outgoing, True
        while parts and there_was_room:
            try:
                if len(parts) == 1:
                    count = self.socket.send(parts[0])
                else:
                    count = self.socket.sendmsg([*islice(parts, _TOGETHER)])
            except (BlockingIOError, InterruptedError):
                return
            self.sent += count
            there_was_room = _advance(parts, count)

    def _pull(self) -> None:
        assert self.socket is not None
        parts, there_was_more = self._incoming, True
        while parts and there_was_more:
            try:
                if len(parts) == 1:
                    count = self.socket.recv_into(parts[0])
                else:
                    count = self.socket.recvmsg_into([*islice(parts, _TOGETHER)])[0]
            except (BlockingIOError, InterruptedError):
                return
            if count == 0:
                raise EOFError("it closed the connection")
            self.received += count
            there_was_more = _advance(parts, count)


def _advance(parts: deque[memoryview], count: int) -> bool:
    """Take the first `count` bytes off `parts`; whether that ends where a part does."""
    while count:
        first = parts[0]
        if len(first) > count:
            parts[0] = first[count:]
            return False
        count -= len(first)
        parts.popleft()
    return True


class Lines:
    """All links of one tag. They are moved together, so that waiting for one peer never stops another's data."""

    def __init__(self) -> None:
        self.links: dict[int, Link] = {}
        self.busy: list[Link] = []
        self._poll = select.poll()
        self._watched: dict[Link, int] = {}

    def sleep(self, awaited: dict[Link, int], seconds: float) -> None:
        """Until a busy link can go on, or for a moment.

        Args:
            awaited: what `Link.wants` is told.
            seconds: how long, where nothing can tell.
        """
        for link in self.busy:
            if link.socket is None:  # nothing tells when a peer connects, but that happens once in a link's life
                time.sleep(seconds)
                return
            wants = link.wants(awaited.get(link, 0))
            if self._watched.get(link) != wants:
                self._poll.register(link.socket, wants)
                self._watched[link] = wants
        if len(self._watched) > len(self.busy):  # one that is idle may be closed by its peer
            for link in [link for link in self._watched if link not in self.busy]:
                self.forget(link)
        self._poll.poll(_DOZE)

    def forget(self, link: Link) -> None:
        """Wake no more for a link, whose socket is still open."""
        if self._watched.pop(link, None) is not None:
            assert link.socket is not None
            self._poll.unregister(link.socket)

    def close(self) -> None:
        """Close all links, so that peers can still read what has been sent.

        Closing a connection on which something has come that nobody read makes the kernel reset it, which also destroys
        what the other side has not read yet, such as why this rank gives up. So what comes is read to its end first.
        """
        left = [link.socket for link in self.busy if link.socket is not None]
        end = time.monotonic() + _LINGER
        with contextlib.suppress(OSError):
            for line in left:
                line.shutdown(socket.SHUT_WR)
        while (left := [line for line in left if not _is_at_its_end(line)]) and time.monotonic() < end:
            time.sleep(0.002)
        for link in self.links.values():
            link.close()


def _is_at_its_end(line: socket.socket) -> bool:
    """Read what has come, and whether the other side has closed."""
    try:
        while line.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class _TcpPending:
    """One exchange: done when its links have moved as many bytes as they had been given by then."""

    def __init__(self, transport: TcpTransport, lines: Lines, links: Sequence[Link]) -> None:
        self._transport, self._lines = transport, lines
        self._left = [(link, link.to_send, link.to_receive) for link in links]

    def done(self) -> bool:
        if self._is_left():
            try:
                self._transport.move(self._lines)
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

    def __init__(self, listener: Listener, links: Sequence[Link]) -> None:
        self._listener, self._links = listener, links
        self._end = time.monotonic() + config.START_TIMEOUT.get()

    def done(self) -> bool:
        waiting = [link.peer for link in self._links if not link.is_connected()]
        if waiting and time.monotonic() > self._end:
            self._listener.raise_missing(waiting)
        return not waiting

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


class TcpTransport:
    """A `Plane` over TCP.

    Args:
        rank: of this process.
        peers: where every rank listens, in rank order; this rank's own among them.
        switchboard: makes and takes the connections.
    """

    name = "tcp"

    def __init__(self, rank: int, peers: Sequence[Peer], listener: Listener) -> None:
        self.rank, self.size = rank, len(peers)
        self._peers = tuple(peers)
        self._listener = listener
        self._lines: dict[int, Lines] = {}
        self._closed = False

    def connect(self, ranks: Sequence[int], tag: int) -> _Connecting:
        return _Connecting(self._listener, [self._link(peer, tag) for peer in ranks if peer != self.rank])

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
            link = lines.links[peer] = Link(self._listener, peer, tag)
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
        self._listener.close_tag(tag)

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
        self._listener.close()
        for tag in list(self._lines):
            self.disconnect(tag)
