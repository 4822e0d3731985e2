"""The control channel's end on every rank but rank 0."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Any

from ring_plugins.core.base.log import logger
from ring_plugins.core.control.channel import CLOSE_SECONDS, GOODBYE, MOST_QUEUED, Channel, ControlConnection
from ring_plugins.core.net.auth import Claim, ClientHandshake, Disconnected, Purpose, Rejected, advance
from ring_plugins.core.net.frames import FrameSocket, to_json
from ring_plugins.core.net.socket_owner import is_same_unix_user
from ring_plugins.core.net.tcp_options import enable_keepalive

#: Seconds to connect to an address, between two rounds over all addresses, and until this rank gives up.
_CONNECT, _PAUSE, _GIVE_UP = 1.0, 0.5, 60.0
#: Attempts before giving up: a rank that was stopped for longer than that finds its first connection dropped.
_ATTEMPTS = 5


class ControlClient(Channel):
    """Connects to rank 0's `ControlServer` in the first calls of `poll`; earlier messages are queued.

    It is in one of four states: not connected, with a handshake under way, connected, and ended. Until connected it
    tries again after an error: rank 0 drops connections if it runs out of files, or if too many are unauthenticated.

    Args:
        rank, size: of this process and of the job.
        address: of the server, from the first gather.
        same_host: whether rank 0 is on this host.
    """

    def __init__(self, rank: int, size: int, address: dict[str, Any], same_host: bool) -> None:
        super().__init__(rank, size)
        self._address, self._same_host = address, same_host
        self._secret = bytes.fromhex(address["secret"])
        self._pending: socket.socket | None = None
        self._handshake = self._new_handshake()
        self._server: ControlConnection | None = None
        self._ended = False
        self._began = time.monotonic()
        self._next_try = 0.0
        self._failed_attempts = 0

    def reconnect(self, address: dict[str, Any], same_host: bool = True) -> None:
        """Connect to the server that takes the place of a lost rank 0; called by the thread that polls.

        Args:
            address: of that server.
            same_host: whether it is on this host.
        """
        if self._pending is not None:
            self._selector.unregister(self._pending)
            self._pending.close()
            self._pending = None
        if self._server is not None:
            self._forget(self._server)
        self._address, self._secret, self._same_host = address, bytes.fromhex(address["secret"]), same_host
        self._ended, self._began, self._next_try, self._failed_attempts = False, time.monotonic(), 0.0, 0

    def poll(self, seconds: float) -> None:
        is_connecting = self._server is None and not self._ended and not self._closed
        if is_connecting and self._pending is None and time.monotonic() >= self._next_try:
            self._connect()
        super().poll(min(seconds, 0.1) if is_connecting else seconds)

    def close(self) -> None:
        end = time.monotonic() + CLOSE_SECONDS
        while self._server is None and not (self._ended or self._closed) and time.monotonic() < end:
            self.poll(0.05)
        super().close()

    def _send_everything(self, seconds: float) -> bool:
        """As every channel does, but connect first: rank 0 would else hear of a lost connection, not of its cause."""
        end = time.monotonic() + seconds
        while self._server is None and not (self._ended or self._closed) and time.monotonic() < end:
            if self._pending is not None:
                self._advance()
            elif time.monotonic() >= self._next_try:
                self._connect()
            time.sleep(0.005)
        return super()._send_everything(end - time.monotonic())

    def abandon(self) -> None:
        if self._pending is not None:
            self._pending.close()
        super().abandon()

    # Connecting -----------------------------------------------------------------------------------

    def _connect(self) -> None:
        connected, why = self._reach()
        if connected is None:
            self._retry(why)
            return
        enable_keepalive(connected)
        connected.setblocking(False)
        self._pending, self._handshake = connected, self._new_handshake()
        self._selector.register(connected, selectors.EVENT_READ, self._advance)

    def _new_handshake(self) -> ClientHandshake:
        return ClientHandshake(self._secret, Purpose.CONTROL, Claim(self.rank))

    def _reach(self) -> tuple[socket.socket | None, str]:
        why = "rank 0 is on this host but does not listen"
        if self._same_host:
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                local.settimeout(_CONNECT)
                local.connect("\0" + self._address["local"])
                if is_same_unix_user(local):
                    return local, ""
                why = "another user's process listens in place of rank 0"
            except OSError:
                pass
            local.close()
        for address in self._address["addresses"] if self._address["port"] else ():
            try:
                return socket.create_connection((address, self._address["port"]), timeout=_CONNECT), ""
            except OSError as error:
                why = f"{address} port {self._address['port']}: {error}"
        return None, why

    def _advance(self) -> None:
        pending = self._pending
        assert pending is not None
        try:
            if not advance(pending, self._handshake):
                return
        except Disconnected as error:
            self._selector.unregister(pending)
            pending.close()
            self._pending = None
            self._retry(str(error), final=isinstance(error, Rejected))
            return
        self._pending = None
        self._server = ControlConnection(0, FrameSocket(pending, Purpose.CONTROL))
        self._selector.modify(pending, selectors.EVENT_READ, self._server)
        self._deliver()

    def _retry(self, why: str, final: bool = False) -> None:
        self._next_try = time.monotonic() + _PAUSE
        self._failed_attempts += 1
        if final or (self._failed_attempts >= _ATTEMPTS and time.monotonic() - self._began > _GIVE_UP):
            self._ended = True
            logger.warning(
                f"rank {self.rank} goes on without a control channel to rank 0 ({why}): reports lack this rank, and a "
                "failure on another host is noticed later."
            )

    # Connected ------------------------------------------------------------------------------------

    def _connections(self) -> list[ControlConnection]:
        return [self._server] if self._server is not None else []

    def _deliver(self) -> None:
        if self._server is not None:
            super()._deliver()
        elif self._ended:
            self._outbox.clear()
        while len(self._outbox) > MOST_QUEUED:
            self._outbox.popleft()

    def _send(self, rank: int, message: bytes, droppable: bool) -> None:
        if self._server is not None and rank == 0:
            self._server.send(message, droppable)

    def _forget(self, connection: ControlConnection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.frames)
        connection.frames.close()
        self._server, self._ended = None, True

    def _say_goodbye(self) -> None:
        if self._server is not None:
            self._server.send(to_json(GOODBYE))
        elif self._pending is not None and self._handshake.has_proved:
            # Rank 0 has not answered in time, and would take a close right after the proof for a failure.
            frames = FrameSocket(self._pending, Purpose.CONTROL)
            frames.send(to_json(GOODBYE))
            with contextlib.suppress(Disconnected):
                frames.write()
            self._outbox.clear()
