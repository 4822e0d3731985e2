"""The bytes of tagged messages from one rank to another: one connection for each direction of a pair.

The sender connects to the receiver and sends messages of any tag; the receiver answers on the same connection. Every
item is a header of fixed size, and EAGER and DATA are followed by a message's data:

    sender -> receiver   EAGER   a message and its data, sent before the receiver has asked for it
                         OFFER   a message whose data waits at the sender
                         DATA    the data of an offer that was taken
                         GONE    the offer that was taken exists no more
                         ASK     tell if you have closed this group, now or later
                         CLOSED  the sender has closed the group, and nothing of it follows
    receiver -> sender   TAKE    send the data of this offer
                         REJECT  the receiver expects another size or type, given in the header
                         GONE    the receiver has closed the message's group
                         CREDIT  so many bytes of eager messages have been fetched

This is MPI's eager and rendezvous protocol. `Outgoing` and `Incoming` move bytes without blocking and know nothing of
matching; collectives/message_sender.py and message_receiver.py decide what is sent when.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from ring_plugins.core.net.auth import Claim, ClientHandshake, Disconnected, Purpose, advance
from ring_plugins.core.net.socket_owner import is_same_unix_user
from ring_plugins.core.net.tcp_options import configure

T = TypeVar("T")

_HEADER = struct.Struct("!BxxxIQqQ24s")
#: Bytes of a header.
HEADER_BYTES = _HEADER.size
#: Bytes up to which a message is sent before the receiver asks for it, and bytes that a receiver keeps of one sender.
EAGER_BYTES, CREDIT_BYTES = 1 << 20, 4 << 20
#: Buffers of one write, and bytes of one read of headers; data beyond it is read into its place.
_WRITE_AT_ONCE, _READ = 8, 4096
#: Seconds between two attempts to connect.
_RETRY = 0.05


class Kind(enum.IntEnum):
    """Of an item; see the module's text."""

    EAGER = 1
    OFFER = 2
    DATA = 3
    GONE = 4
    TAKE = 5
    REJECT = 6
    CREDIT = 7
    ASK = 8
    CLOSED = 9


class Header(NamedTuple):
    """Of an item.

    Attributes:
        kind: what it is.
        number: of an offer, on this connection.
        context: number of the group that the message belongs to.
        tag: the caller's.
        nbytes: of the message; of the credit.
        dtype: name of the message's element type.
    """

    kind: Kind
    number: int = 0
    context: int = 0
    tag: int = 0
    nbytes: int = 0
    dtype: str = ""

    def pack(self) -> bytes:
        return _HEADER.pack(*self[:5], self.dtype.encode()[:24])

    @staticmethod
    def unpack(data: bytes | memoryview) -> Header:
        """The header that bytes hold.

        Raises:
            Disconnected: they hold none.
        """
        kind, number, context, tag, nbytes, dtype = _HEADER.unpack(data)
        try:
            found = Header(Kind(kind), number, context, tag, nbytes, dtype.rstrip(b"\0").decode("ascii"))
        except ValueError as error:
            raise Disconnected("it sent an invalid message") from error
        if not found.dtype.isprintable():  # it stands in errors
            raise Disconnected("it sent an invalid message")
        return found


class Address(NamedTuple):
    """Where a rank accepts messages.

    Attributes:
        local: name of its socket in Linux's abstract namespace.
        addresses, port: for ranks of other hosts; empty and 0 if there are none.
    """

    local: str
    addresses: Sequence[str] = ()
    port: int = 0


class Outgoing(Generic[T]):
    """The connection to one receiver.

    Args:
        peer: the receiver's rank.
        address: where it listens.
        same_host: whether to try its local socket.
        secret: of the job.
        rank: of this process.

    Attributes:
        ready: whether the handshake is over.
        moved: bytes written so far.
    """

    def __init__(self, peer: int, address: Address, same_host: bool, secret: bytes, rank: int) -> None:
        self.peer, self.ready, self.moved = peer, False, 0
        self.socket: socket.socket | None = None
        self._secret, self._claim = secret, Claim(rank, peer)
        locally: list[tuple[str, int]] = [(address.local, -1)] if same_host and address.local else []
        self._targets = deque(locally + [(numeric, address.port) for numeric in address.addresses])
        self._handshake = self._new_handshake()
        self._next_try = 0.0
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        #: The items in the queue that somebody wants to know of, and where each ends.
        self._ends: deque[tuple[int, T]] = deque()
        self._replies = bytearray()

    def put(self, header: Header, data: memoryview | None = None, item: T | None = None) -> None:
        """Queue a header and data; `write` returns `item` once both are sent."""
        self._queue.append(memoryview(header.pack()))
        self._queued += HEADER_BYTES
        if data is not None and len(data):
            self._queue.append(data)
            self._queued += len(data)
        if item is not None:
            self._ends.append((self._queued, item))

    def has_unsent(self) -> bool:
        return bool(self._queue)

    def copy_unsent(self, data: memoryview) -> None:
        """Send what is left of `data` from a copy, since its owner may overwrite it from now on."""
        for place, part in enumerate(self._queue):
            if part.obj is data.obj:
                self._queue[place] = memoryview(bytes(part))

    def unsent(self) -> list[T]:
        """The items that have not been sent whole."""
        return [item for _, item in self._ends]

    def connect(self) -> str:
        """Continue to connect; returns why the last attempt failed, "" if none did in this call."""
        try:
            if self.socket is None:
                if time.monotonic() < self._next_try:
                    return ""
                self._begin()
            assert self.socket is not None
            error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            if _can_write(self.socket):
                self.ready = advance(self.socket, self._handshake)
        except (OSError, Disconnected) as error:
            self.close()
            self._targets.rotate(-1)
            self._next_try = time.monotonic() + _RETRY
            return getattr(error, "strerror", None) or str(error)
        return ""

    def _begin(self) -> None:
        if not self._targets:
            raise OSError(errno.ENETUNREACH, "no network connects the hosts")
        target, port = self._targets[0]
        local = port < 0
        family = socket.AF_UNIX if local else socket.AF_INET6 if ":" in target else socket.AF_INET
        connecting = self.socket = socket.socket(family, socket.SOCK_STREAM)
        connecting.setblocking(False)
        if not local:
            configure(connecting)
        with contextlib.suppress(BlockingIOError):
            connecting.connect("\0" + target if local else (target, port))
        if local and not is_same_unix_user(connecting):
            raise OSError(errno.EACCES, "another user's process listens in its place")
        self._handshake = self._new_handshake()

    def _new_handshake(self) -> ClientHandshake:
        return ClientHandshake(self._secret, Purpose.MESSAGES, self._claim)

    def write(self) -> list[T]:
        """Send what the kernel accepts; returns the items that have been sent whole by now.

        Raises:
            Disconnected: the connection is lost.
        """
        assert self.socket is not None
        parts = self._queue
        try:
            while parts:
                sent = self.socket.sendmsg([*islice(parts, _WRITE_AT_ONCE)])
                self.moved += sent
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.popleft())
                if sent:
                    parts[0] = parts[0][sent:]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            raise Disconnected(error.strerror or str(error)) from error
        finished = []
        while self._ends and self._ends[0][0] <= self.moved:
            finished.append(self._ends.popleft()[1])
        return finished

    def read(self) -> list[Header]:
        """The receiver's answers that have arrived.

        Raises:
            Disconnected: the connection is lost.
        """
        assert self.socket is not None
        end = _receive_all(self.socket, self._replies)
        found = []
        while len(self._replies) >= HEADER_BYTES:
            found.append(Header.unpack(bytes(self._replies[:HEADER_BYTES])))
            del self._replies[:HEADER_BYTES]
        if end and not found:
            raise Disconnected(end)
        return found

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None
            self.ready = False


class Incoming(Generic[T]):
    """The connection from one sender.

    The owner calls `next_header` and, for a header with data, `fill` before the next one.

    Args:
        peer: the sender's rank.
        connected: the authenticated connection.

    Attributes:
        item: the message that is being filled, None between messages.
        moved: bytes of data read so far.
        waits: whether the kernel has no more bytes for now.
    """

    def __init__(self, peer: int, connected: socket.socket) -> None:
        self.peer, self.socket = peer, connected
        if connected.family != socket.AF_UNIX:
            configure(connected)
        self.item: T | None = None
        self.moved = 0
        self.waits = False
        self._left: memoryview | None = None
        self._buffer = memoryview(bytearray(_READ))
        self._start = self._end = 0
        self._replies = bytearray()

    def next_header(self) -> Header | None:
        """The next header, None if it has not arrived.

        Raises:
            Disconnected: the connection is lost.
        """
        while self._end - self._start < HEADER_BYTES:
            if self.waits:
                return None
            if self._start:
                rest = bytes(self._buffer[self._start : self._end])
                self._buffer[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            self._end += self._read_into(self._buffer[self._end :])
        header = Header.unpack(self._buffer[self._start : self._start + HEADER_BYTES])
        self._start += HEADER_BYTES
        return header

    def fill(self, target: memoryview, item: T) -> None:
        """Read the data behind the last header into `target`; `filled` continues."""
        count = min(len(target), self._end - self._start)
        target[:count] = self._buffer[self._start : self._start + count]
        self._start += count
        self.moved += count
        self._left, self.item = target[count:], item

    def divert(self) -> None:
        """Read what is left of the message into memory that nobody uses."""
        if self._left is not None:
            self._left = memoryview(bytearray(len(self._left)))

    def filled(self) -> T | None:
        """The message whose data has arrived completely, None if there is none yet.

        Raises:
            Disconnected: the connection is lost.
        """
        assert self._left is not None
        while len(self._left):
            if self.waits:
                return None
            count = self._read_into(self._left)
            self.moved += count
            self._left = self._left[count:]
        item, self.item, self._left = self.item, None, None
        return item

    def _read_into(self, target: memoryview) -> int:
        try:
            count = self.socket.recv_into(target)
        except (BlockingIOError, InterruptedError):
            self.waits = True
            return 0
        except OSError as error:
            raise Disconnected(error.strerror or str(error)) from error
        if not count:
            raise Disconnected("it closed the connection")
        self.waits = count < len(target)  # else another read would only fail
        return count

    def reply(self, header: Header) -> None:
        """Queue an answer; `write` sends it."""
        self._replies += header.pack()

    def has_unsent(self) -> bool:
        return bool(self._replies)

    def write(self) -> None:
        """Send what the kernel accepts.

        Raises:
            Disconnected: the connection is lost.
        """
        try:
            while self._replies:
                del self._replies[: self.socket.send(self._replies)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            raise Disconnected(error.strerror or str(error)) from error

    def close(self) -> None:
        self.socket.close()


def _can_write(connecting: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connecting, select.POLLOUT)
    return bool(poll.poll(0))


def _receive_all(connected: socket.socket, buffer: bytearray) -> str:
    """Append what has arrived; returns how the connection ended, "" if it did not."""
    try:
        while data := connected.recv(_READ):
            buffer += data
            if len(data) < _READ:
                return ""
    except (BlockingIOError, InterruptedError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return "it closed the connection"
