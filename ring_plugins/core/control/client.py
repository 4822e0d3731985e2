"""The control channel's end on every rank but rank 0."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Any

from ring_plugins.core.control.channel import Channel, FrameSocket, is_proof, nonce, proof
from ring_plugins.core.control.tcp_liveness import enable_keepalive

#: Seconds for one address, between rounds of all of them, and until this rank goes on without a channel.
_CONNECT, _PAUSE, _GIVE_UP = 1.0, 0.5, 60.0
_MOST_WAITING = 1000


class ControlClient(Channel):
    """Connects to rank 0's `Hub` in the first calls of `poll`; messages given before wait.

    Args:
        rank, size: of this process and of the job.
        address: of the hub, from the first gather.
        same_host: whether rank 0 is on this host.

    Attributes:
        trouble: why there is no connection, for texts; "" while there is one or may come one.
    """

    def __init__(self, rank: int, size: int, address: dict[str, Any], same_host: bool) -> None:
        super().__init__(rank, size)
        self._address, self._same_host = address, same_host
        self._hub: FrameSocket | None = None
        self._challenge = nonce()
        self._ended = self._introduced = False
        self._began = time.monotonic()
        self._next_try = 0.0
        self.trouble = ""

    def poll(self, seconds: float) -> None:
        if self._hub is None and not self._ended and not self._closed and time.monotonic() >= self._next_try:
            self._connect()
        super().poll(seconds if self._hub is not None or self._ended else min(seconds, 0.1))

    def _connect(self) -> None:
        connected, how = self._reach()
        if connected is None:
            self._next_try = time.monotonic() + _PAUSE
            if time.monotonic() - self._began > _GIVE_UP:
                self._ended, self.trouble = True, how
            return
        enable_keepalive(connected)
        self._hub = FrameSocket(connected)
        self._selector.register(connected, selectors.EVENT_READ, self._hub)

    def _reach(self) -> tuple[socket.socket | None, str]:
        if self._same_host:
            with contextlib.suppress(OSError):
                local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                local.settimeout(_CONNECT)
                local.connect("\0" + self._address["local"])
                return local, ""
        how = "rank 0 is on this host but does not listen"
        for address in self._address["addresses"]:
            try:
                return socket.create_connection((address, self._address["port"]), timeout=_CONNECT), ""
            except OSError as error:
                how = f"{address} port {self._address['port']}: {error}"
        return None, how

    def _connections(self) -> list[FrameSocket]:
        return [self._hub] if self._hub is not None else []

    def _deliver(self) -> None:
        if self._hub is not None and self._hub.trusted:
            super()._deliver()
        elif self._ended:
            self._outbox.clear()
        while len(self._outbox) > _MOST_WAITING:
            self._outbox.popleft()

    def _send(self, rank: int, message: list[Any], droppable: bool) -> None:
        if self._hub is not None and rank == 0:
            self._hub.send(message, droppable)

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        hub = key.data
        for message in self._transfer(hub, events):
            if not hub.trusted:
                self._introduce(hub, message)
            elif message == ["farewell", {}]:
                self._end()
                self.on_left(0)
            else:
                self._handle(0, message)

    def _introduce(self, hub: FrameSocket, message: Any) -> None:
        """Prove to the hub that this is a rank of the job, and have it prove that it is rank 0."""
        secret = self._address["secret"]
        if isinstance(message, dict) and "nonce" in message:
            said = proof(secret, "link", message["nonce"], self.rank)
            hub.send({"rank": self.rank, "nonce": self._challenge, "proof": said})
            self._introduced = True
        elif isinstance(message, dict) and is_proof(message.get("proof"), secret, "hub", self._challenge):
            hub.trusted = True
        else:
            self._end("something else than rank 0 answered")

    def _lose(self, connection: FrameSocket, how: str) -> None:
        was_trusted = connection.trusted
        self._end(how)
        if was_trusted:
            self.on_lost(0, how)

    def _end(self, trouble: str = "") -> None:
        hub, self._hub = self._hub, None
        if hub is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(hub.socket)
            hub.close()
        self._ended, self.trouble = True, trouble

    def _farewell(self) -> None:
        if self._hub is not None and self._introduced:
            self._hub.send(["farewell", {}])
