"""Sockets between ranks, and what is still to be moved over each: bytes, without a word about operations."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from itertools import islice

from ring_plugins.core.plane import Bytes
from ring_plugins.core.switchboard import Switchboard

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

    def __init__(self, switchboard: Switchboard, peer: int, tag: int) -> None:
        self.peer, self._tag, self._switchboard = peer, tag, switchboard
        self.socket: socket.socket | None = None
        self.to_send = self.to_receive = self.sent = self.received = 0
        self._enough = 1
        self._outgoing: deque[memoryview] = deque()
        self._incoming: deque[memoryview] = deque()

    def is_connected(self) -> bool:
        """Whether bytes can move: the lower rank connects, the higher one is connected to."""
        if self.socket is None:
            self.socket = self._switchboard.line(self.peer, self._tag)
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
