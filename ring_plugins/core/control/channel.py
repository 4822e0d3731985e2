"""What both ends of the control channel have in common.

Messages on a socket that never blocks: a length and JSON, which unlike pickle can do no harm.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("!I")
#: Longest message, and longest before the other side has proved that it belongs to this job.
_LONGEST, _LONGEST_FROM_STRANGERS = 1 << 24, 1 << 10
#: What may wait to be sent; beyond it messages that nobody must have are dropped.
ENOUGH = 1 << 22


class Disconnected(Exception):
    """The other side is gone; the text says how that was noticed."""


class FrameSocket:
    """One connection.

    Attributes:
        trusted: whether the other side has proved that it knows the job's secret.
        dropped: messages that were not sent because too many waited.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.trusted = False
        self.dropped = 0
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._outgoing)

    def send(self, message: Any, droppable: bool = False) -> None:
        """Take a message; `write` sends it."""
        if droppable and len(self._outgoing) > ENOUGH:
            self.dropped += 1
            return
        data = json.dumps(message, separators=(",", ":")).encode()
        self._outgoing += _LENGTH.pack(len(data)) + data

    def write(self) -> None:
        """Send what the network takes now.

        Raises:
            Disconnected: the connection is lost.
        """
        while self._outgoing:
            try:
                sent = self.socket.send(memoryview(self._outgoing)[: 1 << 18].tobytes())
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise Disconnected(str(error)) from error
            del self._outgoing[:sent]

    def read(self) -> list[Any]:
        """All messages that have arrived whole.

        Raises:
            Disconnected: the other side closed, or sent what is no message.
        """
        end = ""
        try:
            while data := self.socket.recv(1 << 18):
                self._incoming += data
            end = "it closed the connection"
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            end = error.strerror or str(error)
        messages = list(self._whole_messages())
        if end and not messages:
            raise Disconnected(end)
        return messages  # the end is met again by the next call

    def _whole_messages(self) -> list[Any]:
        messages = []
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > (_LONGEST if self.trusted else _LONGEST_FROM_STRANGERS):
                raise Disconnected(f"a message of {length} bytes is none of this job's")
            end = _LENGTH.size + length
            if len(self._incoming) < end:
                break
            try:
                messages.append(json.loads(bytes(self._incoming[_LENGTH.size : end])))
            except ValueError as error:
                raise Disconnected("it sent what is no message of this job's") from error
            del self._incoming[:end]
        return messages

    def close(self) -> None:
        self.socket.close()


def nonce() -> str:
    """Sixteen random bytes that the other side must sign."""
    return secrets.token_hex(16)


def proof(secret: str, *said: object) -> str:
    """What only someone who knows the job's secret can say about `said`."""
    text = "\n".join(map(str, said))
    return hmac.new(bytes.fromhex(secret), text.encode(), hashlib.sha256).hexdigest()


def is_proof(claimed: object, secret: str, *said: object) -> bool:
    """Whether `claimed` is that."""
    return isinstance(claimed, str) and hmac.compare_digest(claimed, proof(secret, *said))


Body = dict[str, Any]
#: Told the rank that sent a message, and its body.
Handler = Callable[[int, Body], None]

#: To everyone else; rank 0 only.
EVERYONE = -1


class Channel(abc.ABC):
    """Carries small messages between rank 0 and every other rank, beside the data.

    Messages are given by any thread and move in `poll`, which one thread calls; so do the handlers run there. Nothing
    waits for a message: a channel that is slow or broken costs the job its reports, never a step.

    Args:
        rank: of this process.
        size: of the job.

    Attributes:
        on_lost: called with a rank whose connection ended without a farewell, and how that was noticed.
        on_left: called with a rank that said farewell.
        on_joined: called on rank 0 with a rank that can be told something from now on.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.on_lost: Callable[[int, str], None] = lambda rank, how: None
        self.on_left: Callable[[int], None] = lambda rank: None
        self.on_joined: Callable[[int], None] = lambda rank: None
        self._handlers: dict[str, Handler] = {}
        self._outbox: deque[tuple[int, str, Body, bool]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._waker = socket.socketpair()
        self._wake_end.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ, None)
        self._idle = threading.Event()
        self._closed = False

    def on(self, kind: str, handler: Handler) -> None:
        """Call `handler` with every message of this kind."""
        self._handlers[kind] = handler

    def tell(self, rank: int, kind: str, body: Body | None = None, *, droppable: bool = False) -> None:
        """Send a message.

        Args:
            rank: rank 0, or on rank 0 any other or `EVERYONE`.
            kind: which handler takes it.
            body: what JSON can hold.
            droppable: whether it may be lost when the network cannot follow.
        """
        self._idle.clear()
        self._outbox.append((rank, kind, body or {}, droppable))
        self._wake()

    def poll(self, seconds: float) -> None:
        """Move messages and call handlers; returns after `seconds` at the latest, or when something happened."""
        if self._closed:
            time.sleep(seconds)
            return
        self._deliver()
        self._watch_writes()
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._wake_end:
                with contextlib.suppress(BlockingIOError):
                    self._wake_end.recv(4096)
            else:
                self._serve(key, events)
        self._deliver()
        if not self._has_more_to_send():
            self._idle.set()

    @property
    def connected(self) -> list[int]:
        """Ranks that can be told something now."""
        return []

    def flush(self, seconds: float) -> bool:
        """Wait, in another thread than the one that polls, until all is sent; whether it is."""
        self._wake()
        return self._idle.wait(seconds)

    def close(self) -> None:
        """Say farewell and end; called by the thread that polls."""
        if self._closed:
            return
        self._farewell()
        end = time.monotonic() + 0.5
        while self._has_more_to_send() and time.monotonic() < end:
            self.poll(0.05)
        self.abandon()

    def abandon(self) -> None:
        """Close all sockets and say nothing, as a forked child must."""
        if self._closed:
            return
        self._closed = True
        self._idle.set()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._waker.close()
        self._selector.close()

    # For the two ends -----------------------------------------------------------------------------

    @abc.abstractmethod
    def _send(self, rank: int, message: list[Any], droppable: bool) -> None:
        """Hand a message to the connections it is for."""

    @abc.abstractmethod
    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        """A socket is ready."""

    @abc.abstractmethod
    def _connections(self) -> list[FrameSocket]:
        """Those there are."""

    @abc.abstractmethod
    def _lose(self, connection: FrameSocket, how: str) -> None:
        """A connection has ended."""

    @abc.abstractmethod
    def _farewell(self) -> None:
        """Tell the other end that this one leaves in peace."""

    def _handle(self, sender: int, message: Any) -> None:
        if isinstance(message, list) and len(message) == 2 and isinstance(message[1], dict):
            handler = self._handlers.get(message[0])
            if handler is not None:
                handler(sender, message[1])

    def _transfer(self, connection: FrameSocket, events: int) -> list[Any]:
        """Write and read one connection; an end of it is dealt with here."""
        try:
            if events & selectors.EVENT_WRITE:
                connection.write()
            return connection.read() if events & selectors.EVENT_READ else []
        except Disconnected as error:
            self._lose(connection, str(error))
            return []

    def _deliver(self) -> None:
        while self._outbox:
            rank, kind, body, droppable = self._outbox.popleft()
            if rank == self.rank:
                self._handle(rank, [kind, body])
            else:
                self._send(rank, [kind, body], droppable)

    def _watch_writes(self) -> None:
        for connection in self._connections():
            if connection.has_more_to_send:
                try:
                    connection.write()
                except Disconnected as error:
                    self._lose(connection, str(error))
                    continue
            key = self._selector.get_key(connection.socket)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_more_to_send else 0)
            if key.events != wanted:
                self._selector.modify(connection.socket, wanted, key.data)

    def _has_more_to_send(self) -> bool:
        return bool(self._outbox) or any(connection.has_more_to_send for connection in self._connections())

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
