"""The control channel: small messages between rank 0 and every other rank, beside the data.

Rank 0 is the server, the other ranks are clients, and this file holds what both have in common. A message is
`[kind, body]` in JSON on an authenticated connection (core/net/auth.py). Either end sends "goodbye" before it
closes a connection; a connection that ends without it is a failure.
"""

from __future__ import annotations

import abc
import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ring_plugins.core.base.log import logger
from ring_plugins.core.net.auth import Disconnected
from ring_plugins.core.net.frames import FrameSocket, from_json, to_json

#: Bytes that may wait to be sent on one connection; beyond it droppable messages are dropped.
_MOST_UNSENT = 1 << 22
#: Messages that may wait for a connection; beyond it the oldest are dropped.
MOST_QUEUED = 1000
#: Seconds that `Channel.close` takes to send what is left.
CLOSE_SECONDS = 0.5

Body = dict[str, Any]
#: Called with the rank that sent a message, and its body.
Handler = Callable[[int, Body], None]

#: In place of a rank: all other ranks; on rank 0 only.
EVERYONE = -1

GOODBYE: list[Any] = ["goodbye", {}]


class ControlConnection:
    """An authenticated connection to a rank, carrying control messages.

    Attributes:
        rank: at the other end.
        frames: the messages as bytes.
    """

    def __init__(self, rank: int, frames: FrameSocket) -> None:
        self.rank, self.frames = rank, frames

    @property
    def is_open(self) -> bool:
        return self.frames.fileno() >= 0

    def send(self, message: bytes, droppable: bool = False) -> None:
        """Queue a message, which `frames.write` sends; drop a droppable one if too much waits already."""
        if not droppable or self.frames.unsent <= _MOST_UNSENT:
            self.frames.send(message)


class Channel(abc.ABC):
    """One rank's end of the control channel.

    Any thread may call `tell`. One thread calls `poll`, which moves messages and runs handlers. Nothing waits for a
    message: a channel that is slow or broken costs the job its reports, never a step.

    Args:
        rank: of this process.
        size: of the job.

    Attributes:
        on_lost: called with a rank whose connection ended without a goodbye, and the reason.
        on_left: called with a rank that sent goodbye.
        on_joined: called on rank 0 with a rank that has just connected.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.on_lost: Callable[[int, Disconnected], None] = lambda rank, how: None
        self.on_left: Callable[[int], None] = lambda rank: None
        self.on_joined: Callable[[int], None] = lambda rank: None
        self._handlers: dict[str, Handler] = {}
        self._failed_handlers: set[str] = set()
        self._outbox: deque[tuple[int, str, Body, bool]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._waker = socket.socketpair()
        self._wake_end.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ, None)
        self._idle = threading.Event()
        self._poller = 0  # the thread that polls
        self._closed = False

    def on(self, kind: str, handler: Handler) -> None:
        """Call `handler` with every message of this kind."""
        self._handlers[kind] = handler

    def tell(self, rank: int, kind: str, body: Body | None = None, *, droppable: bool = False) -> None:
        """Send a message.

        Args:
            rank: rank 0, or on rank 0 any other or `EVERYONE`.
            kind: selects the handler.
            body: values that JSON can hold.
            droppable: whether it may be dropped when the network is too slow.

        Raises:
            TypeError: a handler took `rank` from a message that no release of ours sends.
        """
        if not isinstance(rank, int):
            raise TypeError(f"{rank!r} is not a rank")
        self._idle.clear()
        self._outbox.append((rank, kind, body or {}, droppable))
        self._wake()

    def poll(self, seconds: float) -> None:
        """Move messages and call handlers; returns after `seconds` at the latest, or when something happened."""
        if self._closed:
            time.sleep(seconds)
            return
        self._poller = threading.get_ident()
        self._deliver()
        self._write_all()
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._wake_end:
                with contextlib.suppress(BlockingIOError):
                    self._wake_end.recv(4096)
            elif isinstance(key.data, ControlConnection):
                if events & selectors.EVENT_WRITE:
                    self._write(key.data)
                if events & selectors.EVENT_READ and key.data.is_open:
                    self._read(key.data)
            else:
                key.data()
        self._deliver()
        if not self._has_more_to_send():
            self._idle.set()

    @property
    def connected(self) -> list[int]:
        """Ranks that are connected now."""
        return [connection.rank for connection in self._connections()]

    def flush(self, seconds: float) -> bool:
        """Wait until everything is sent; returns whether it is.

        The thread that polls calls this only when it dies, and sends by itself.
        """
        if threading.get_ident() == self._poller:
            return self._send_everything(seconds)
        self._wake()
        return self._idle.wait(seconds)

    def drain(self, seconds: float) -> None:
        """Move messages until everything is sent; called by the thread that polls."""
        end = time.monotonic() + seconds
        while not self._closed and self._has_more_to_send() and time.monotonic() < end:
            self.poll(0.02)

    def _send_everything(self, seconds: float) -> bool:
        """Send what is queued, by nothing but the connections: anything else may be what has failed."""
        end = time.monotonic() + seconds
        while not self._closed:
            self._deliver()
            for connection in self._connections():
                with contextlib.suppress(Disconnected):
                    connection.frames.write()
            if not self._has_more_to_send():
                return True
            if time.monotonic() > end:
                break
            time.sleep(0.005)
        return False

    def close(self) -> None:
        """Send goodbye and close; called by the thread that polls."""
        if self._closed:
            return
        self._deliver()  # what was told before goes out before the goodbye, after which nobody reads
        self._say_goodbye()
        end = time.monotonic() + CLOSE_SECONDS
        while self._has_more_to_send() and time.monotonic() < end:
            self.poll(0.05)
        self.abandon()

    def abandon(self) -> None:
        """Close all sockets without a goodbye, as a forked child must.

        Unregisters nothing from the selector: the kernel's side of it is the parent's too.
        """
        if self._closed:
            return
        self._closed = True
        self._idle.set()
        for connection in self._connections():
            connection.frames.close()
        self._wake_end.close()
        self._waker.close()
        self._selector.close()

    # Implemented by the two ends ------------------------------------------------------------------

    @abc.abstractmethod
    def _send(self, rank: int, message: bytes, droppable: bool) -> None:
        """Queue a message on the connections to `rank`."""

    @abc.abstractmethod
    def _connections(self) -> list[ControlConnection]:
        """Authenticated connections."""

    @abc.abstractmethod
    def _forget(self, connection: ControlConnection) -> None:
        """A connection has ended, with or without a goodbye."""

    @abc.abstractmethod
    def _say_goodbye(self) -> None:
        """Queue a goodbye on every connection."""

    def _handle(self, sender: int, kind: Any, body: Any) -> None:
        handler = self._handlers.get(kind) if isinstance(kind, str) and isinstance(body, dict) else None
        if handler is None:
            return
        try:
            handler(sender, body)
        except Exception:  # an error in a report must not end the monitor thread
            if kind not in self._failed_handlers:
                self._failed_handlers.add(kind)
                logger.exception(f'rank {self.rank}: handling the message "{kind}" of rank {sender} failed')

    def _read(self, connection: ControlConnection, lost: Disconnected | None = None) -> None:
        """Handle what has arrived on a connection, and its end.

        Args:
            connection: to read.
            lost: why it has ended, None if that is not known yet.
        """
        messages = []
        try:
            messages = connection.frames.read()
        except Disconnected as error:
            lost = lost or error
        try:
            for data in messages:
                self._take(connection, data)
                if not connection.is_open:  # by a goodbye, or by a handler
                    return
        except Disconnected as error:
            lost = error
        if lost is not None:
            self._forget(connection)
            self.on_lost(connection.rank, lost)

    def _take(self, connection: ControlConnection, data: bytes) -> None:
        message = from_json(data)
        if not isinstance(message, list) or len(message) != 2:
            raise Disconnected("it sent an invalid message", is_invalid=True)
        if message == GOODBYE:
            self._forget(connection)
            self.on_left(connection.rank)
        else:
            self._handle(connection.rank, *message)

    def _write(self, connection: ControlConnection) -> None:
        try:
            connection.frames.write()
        except Disconnected as error:
            self._read(connection, error)  # the rank may have said why it ends

    def _deliver(self) -> None:
        while self._outbox:
            rank, kind, body, droppable = self._outbox.popleft()
            if rank == self.rank:
                self._handle(rank, kind, body)
            else:
                self._send(rank, to_json([kind, body]), droppable)

    def _write_all(self) -> None:
        for connection in self._connections():
            if connection.frames.unsent:
                self._write(connection)
                if not connection.is_open:
                    continue
            key = self._selector.get_key(connection.frames)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.frames.unsent else 0)
            if key.events != wanted:
                self._selector.modify(connection.frames, wanted, connection)

    def _has_more_to_send(self) -> bool:
        return bool(self._outbox) or any(connection.frames.unsent for connection in self._connections())

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
