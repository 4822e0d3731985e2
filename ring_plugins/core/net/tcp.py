"""Moves bytes between hosts over plain TCP sockets, without MPI and without any framework.

The problem: a communicator exchanges large arrays with several peers at once and must neither copy them nor let one
slow peer stop the others, while one thread of Python does the arithmetic in between.

Each pair of ranks has one connection for each tag (one communicator, one rail). So a byte stream carries one
communicator's messages, in an order that both ends know, and nothing else: no framing, no copy between socket and numpy
memory, and no communicator waits behind another's data. That is also why a size mismatch must be found before data
moves: net_group.py sends headers for that, as ordinary messages.

The caller makes progress by asking `done()`, as in MPI; between two calls the kernel's buffers go on sending and
receiving. Threads that move data on their own would contend with the caller for the GIL exactly when it does
arithmetic.

A waiting rank sleeps in poll(2). Waking it for every packet would cost more than moving the data, so the kernel is told
(SO_RCVLOWAT) to wake it only once all that it waits for has arrived, or enough to be worth it. Nothing is registered
for a connection without transfers: a peer that has finished may close it, which is no error.

Closing in the middle of an operation needs care, see `ConnectionGroup.close`.
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
from ring_plugins.core.base.arguments import read_each, read_port
from ring_plugins.core.base.errors import ArgumentError, LaunchError, PeerFailed, RingError
from ring_plugins.core.base.member import Member
from ring_plugins.core.base.types import Bytes
from ring_plugins.core.net.listener import Listener

#: Arrays handed to the kernel in one call: a header and its data leave together.
_ARRAYS_PER_CALL = 8
#: Received bytes for which it is worth waking a rank that waits for more: what 10 Gbit/s brings in 400 µs.
_WORTH_WAKING = 512 * 1024
#: Longest sleep in milliseconds if nothing arrives: the caller then checks whether the peer is still alive.
_LONGEST_SLEEP = 10
#: Seconds for which a connection that is closed in the middle of an operation is read to its end.
_LINGER = 2.0
#: Seconds without a byte after which a peer that has left the job is not expected to send any more. Its kernel sends
#: what the peer left behind, and a lost packet is sent again after a second or two.
_SILENCE = 5.0


class PeerConnection:
    """The connection with one peer for one tag, and what remains to be moved over it.

    Attributes:
        to_send, to_receive: bytes handed over so far, in all.
        sent, received: bytes moved so far.
        received_at: when bytes last arrived, by `time.monotonic`.
    """

    def __init__(self, listener: Listener, peer: int, tag: int) -> None:
        self.peer, self._tag, self._listener = peer, tag, listener
        self.socket: socket.socket | None = None
        self.to_send = self.to_receive = self.sent = self.received = 0
        self.received_at = 0.0
        self._low_water = 1
        self._outgoing: deque[memoryview] = deque()
        self._incoming: deque[memoryview] = deque()

    def is_connected(self) -> bool:
        """Whether bytes can move; connects if this rank is the lower of the two."""
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

    def poll_events(self, awaited: int = 0) -> int:
        """Events to poll the socket for, after telling the kernel how many bytes are worth waking for.

        Args:
            awaited: value of `received` that a request waits for; 0 for none.
        """
        assert self.socket is not None
        target = awaited if awaited > self.received else self.to_receive
        low_water = max(1, min(target - self.received, _WORTH_WAKING))
        if low_water != self._low_water:
            self._low_water = low_water
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
        return (select.POLLOUT if self._outgoing else 0) | (select.POLLIN if self._incoming else 0)

    def move(self) -> None:
        """Send and receive what can be moved without blocking.

        Raises:
            OSError: the connection is broken.
            EOFError: the peer has closed it.
        """
        if self.socket is None and not self.is_connected():
            return
        try:
            if self._outgoing:
                self._send_some()
        finally:  # what a peer sent before it ended can still be read
            if self._incoming:
                self._receive_some()

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    # If the kernel moves fewer bytes than asked, it has no room or no data left: another call would fail (EAGAIN).

    def _send_some(self) -> None:
        assert self.socket is not None
        arrays, complete = self._outgoing, True
        while arrays and complete:
            try:
                if len(arrays) == 1:
                    count = self.socket.send(arrays[0])
                else:
                    count = self.socket.sendmsg([*islice(arrays, _ARRAYS_PER_CALL)])
            except (BlockingIOError, InterruptedError):
                return
            self.sent += count
            complete = _advance(arrays, count)

    def _receive_some(self) -> None:
        assert self.socket is not None
        arrays, complete = self._incoming, True
        while arrays and complete:
            try:
                if len(arrays) == 1:
                    count = self.socket.recv_into(arrays[0])
                else:
                    count = self.socket.recvmsg_into([*islice(arrays, _ARRAYS_PER_CALL)])[0]
            except (BlockingIOError, InterruptedError):
                return
            if count == 0:
                raise EOFError("it closed the connection")
            self.received += count
            self.received_at = time.monotonic()
            complete = _advance(arrays, count)


def _advance(arrays: deque[memoryview], count: int) -> bool:
    """Remove the first `count` bytes; returns whether they end at the end of an array."""
    while count:
        first = arrays[0]
        if len(first) > count:
            arrays[0] = first[count:]
            return False
        count -= len(first)
        arrays.popleft()
    return True


class ConnectionGroup:
    """All connections of one tag. They move together, so that waiting for one peer never stops another's data.

    Attributes:
        connections: by peer.
        busy: those with transfers under way.
    """

    def __init__(self) -> None:
        self.connections: dict[int, PeerConnection] = {}
        self.busy: list[PeerConnection] = []
        self._poll = select.poll()
        self._polled: dict[PeerConnection, int] = {}

    def sleep(self, awaited: dict[PeerConnection, int], seconds: float) -> None:
        """Sleep briefly, or until a busy connection can make progress.

        Args:
            awaited: see `PeerConnection.poll_events`.
            seconds: how long, if nothing can wake the caller.
        """
        for connection in self.busy:
            if connection.socket is None:  # nothing wakes us when a peer connects, but that happens once
                time.sleep(seconds)
                return
            events = connection.poll_events(awaited.get(connection, 0))
            if self._polled.get(connection) != events:
                self._poll.register(connection.socket, events)
                self._polled[connection] = events
        if len(self._polled) > len(self.busy):
            for connection in [connection for connection in self._polled if connection not in self.busy]:
                del self._polled[connection]
                assert connection.socket is not None
                self._poll.unregister(connection.socket)
        self._poll.poll(_LONGEST_SLEEP)

    def close(self) -> None:
        """Close all connections so that peers can still read what has been sent.

        If a socket with unread data is closed, the kernel resets the connection, and the reset discards what the peer
        has not read yet, such as the reason why this rank gives up. So shut down our direction first, and read until
        the peer closes, for a limited time.
        """
        sockets = [connection.socket for connection in self.busy if connection.socket is not None]
        end = time.monotonic() + _LINGER
        with contextlib.suppress(OSError):
            for connected in sockets:
                connected.shutdown(socket.SHUT_WR)
        while (sockets := [connected for connected in sockets if not _drain(connected)]) and time.monotonic() < end:
            time.sleep(0.002)
        for connection in self.connections.values():
            connection.close()


def _drain(connected: socket.socket) -> bool:
    """Discard what has arrived; returns whether the other side has closed."""
    try:
        while connected.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class TcpTransport:
    """A `Transport` over TCP.

    Args:
        rank: of this process.
        peers: all ranks, this one included.
        listener: makes and accepts the connections.

    Attributes:
        address: of this rank, in the network that the job uses.
        listener: as given.
    """

    name = "tcp"

    def __init__(self, rank: int, peers: Sequence[Member], listener: Listener) -> None:
        self.rank, self.size = rank, len(peers)
        self.listener = self._listener = listener
        listener.peers = {one.rank: one for one in peers}
        self.address = self.peers[rank].address
        self._groups: dict[int, ConnectionGroup] = {}
        self._closed = False

    @property
    def peers(self) -> dict[int, Member]:
        """The ranks by rank."""
        return self._listener.peers

    def connect(self, ranks: Sequence[int], tag: int) -> _ConnectRequest:
        return _ConnectRequest(self._listener, [self._connection(peer, tag) for peer in ranks if peer != self.rank])

    def exchange(
        self, outgoing: Sequence[tuple[int, Bytes]], incoming: Sequence[tuple[int, Bytes]], tag: int
    ) -> _TcpRequest:
        if self._closed:
            raise RingError(f"the TCP transport of rank {self.rank} has been closed.")
        used = []
        for peer, data in incoming:
            if data.size:
                used.append(connection := self._connection(peer, tag))
                connection.receive(data)
        for peer, data in outgoing:
            if data.size:
                used.append(connection := self._connection(peer, tag))
                connection.send(data)
        group = self._groups.setdefault(tag, ConnectionGroup())
        for connection in used:
            if connection not in group.busy:
                group.busy.append(connection)
        # Nothing moves yet, so that a header and the data after it leave together.
        return _TcpRequest(self, group, used if len(used) == 1 else list(dict.fromkeys(used)))

    def move(self, group: ConnectionGroup) -> None:
        """Let every busy connection of a group send and receive what it can.

        Raises:
            PeerFailed: a connection is lost.
        """
        finished = False
        for connection in group.busy:
            try:
                connection.move()
            except LaunchError as error:  # a connection of a communicator that has lost members is made only now
                raise PeerFailed(str(error), connection.peer) from error
            except (OSError, EOFError) as error:
                raise self._lost(connection.peer, error) from error
            finished = finished or not connection.is_busy()
        if finished:
            group.busy = [connection for connection in group.busy if connection.is_busy()]

    def is_receiving(self, rank: int, tag: int) -> bool:
        group = self._groups.get(tag)
        connection = group.connections.get(rank) if group is not None else None
        return connection is not None and time.monotonic() - connection.received_at < _SILENCE

    def progress(self, tag: int) -> None:
        group = self._groups.get(tag)
        if group is not None and group.busy:
            self.move(group)

    def disconnect(self, tag: int) -> None:
        group = self._groups.pop(tag, None)
        if group is not None:
            group.close()
        self._listener.close_tag(tag)

    def abandon(self, tag: int) -> None:
        """Close the connections of a tag at once, with transfers under way that nobody needs any more."""
        group = self._groups.pop(tag, None)
        for connection in group.connections.values() if group is not None else ():
            connection.close()
        self._listener.close_tag(tag)

    def close(self) -> None:
        """Close all connections; call after the last exchange is done on all ranks."""
        self._closed = True
        self._listener.close()
        for tag in list(self._groups):
            self.disconnect(tag)

    def _connection(self, peer: int, tag: int) -> PeerConnection:
        group = self._groups.setdefault(tag, ConnectionGroup())
        connection = group.connections.get(peer)
        if connection is None:
            if peer not in self.peers or peer == self.rank:
                raise ArgumentError(f"rank {self.rank} was asked to exchange with rank {peer} of {self.size}.")
            connection = group.connections[peer] = PeerConnection(self._listener, peer, tag)
        return connection

    def _lost(self, peer: int, error: Exception) -> PeerFailed:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return PeerFailed(
            f"rank {self.rank} lost its connection to rank {peer} on {self.peers[peer].host} ({reason}). The rank "
            f"or its host has ended; look for the error that rank {peer} printed.",
            peer,
        )


class _TcpRequest:
    """One exchange: done when its connections have moved as many bytes as they had been given when it started."""

    def __init__(self, transport: TcpTransport, group: ConnectionGroup, connections: Sequence[PeerConnection]) -> None:
        self._transport, self._group = transport, group
        self._pending = [(connection, connection.to_send, connection.to_receive) for connection in connections]

    def done(self) -> bool:
        if self._is_pending():
            try:
                self._transport.move(self._group)
            except PeerFailed:
                if self._is_pending():
                    raise
            return not self._is_pending()
        return True

    def _is_pending(self) -> bool:
        if self._pending:
            self._pending = [goal for goal in self._pending if goal[0].sent < goal[1] or goal[0].received < goal[2]]
        return bool(self._pending)

    def missing(self) -> list[int]:
        return [connection.peer for connection, _, _ in self._pending]

    def nap(self, seconds: float) -> None:
        self._group.sleep({connection: received for connection, _, received in self._pending}, seconds)


class _ConnectRequest:
    """Connects to all ranks of a group up front, so that a firewall is noticed now and not in a step."""

    def __init__(self, listener: Listener, connections: Sequence[PeerConnection]) -> None:
        self._listener, self._connections = listener, connections
        self._waiting = [connection.peer for connection in connections]
        self._end = time.monotonic() + config.START_TIMEOUT.get()

    def done(self) -> bool:
        self._waiting = [connection.peer for connection in self._connections if not connection.is_connected()]
        if self._waiting and time.monotonic() > self._end:
            self._listener.raise_missing(self._waiting)
        return not self._waiting

    def missing(self) -> list[int]:
        return self._waiting

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


def open_transport(
    rank: int, hosts: Sequence[str], addresses: Sequence[str], gather: Callable[[Any], list[Any]]
) -> TcpTransport:
    """Listen, and exchange ports with the other ranks; all ranks call.

    Args:
        rank: of this process.
        hosts: names of the ranks' hosts, for messages.
        addresses: to listen on, in rank order.
        gather: returns every rank's payload in rank order.
    """
    listener = Listener(addresses[rank], min(15.0, config.START_TIMEOUT.get()))
    try:
        gathered = gather([listener.port, secrets.token_hex(32) if rank == 0 else ""])
        ports, secret = read_each(gathered, lambda item: read_port(item[0])), str(gathered[0][1])
        peers = [
            Member(one, host=host, address=address, port=port)
            for one, (host, address, port) in enumerate(zip(hosts, addresses, ports, strict=True))
        ]
        listener.open(rank, peers, secret)
    except BaseException:
        listener.close()
        raise
    return TcpTransport(rank, peers, listener)
