"""Rank 0's end of the control channel: one connection from every other rank."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from ring_plugins.core.control.channel import EVERYONE, GOODBYE, MOST_QUEUED, Channel, ControlConnection
from ring_plugins.core.linux.process import raise_open_file_limit
from ring_plugins.core.net.acceptor import Acceptor, Authenticated
from ring_plugins.core.net.auth import Claim, Purpose
from ring_plugins.core.net.frames import FrameSocket, to_json
from ring_plugins.core.net.tcp_options import enable_keepalive

#: Open files that rank 0 needs beside a connection for every rank, and connections that it accepts beside them.
_OTHER_FILES, _OTHER_CONNECTIONS = 512, 64


class ControlServer(Channel):
    """Listens before the other ranks learn its address. Messages to ranks that have yet to connect are queued.

    For ranks of its host it listens on a socket in Linux's abstract namespace, which uses neither a file nor a port.
    The port for other hosts is closed if there are none (`only_this_host`).

    Args:
        size: of the job.
        addresses: of this host, for other hosts to connect to, the likeliest first; empty if there are none.
        most: ranks that may connect, if some may join later.
    """

    def __init__(self, size: int, addresses: Sequence[str] = (), most: int = 0) -> None:
        super().__init__(0, size)
        self._most = max(size, most)
        raise_open_file_limit(size + _OTHER_FILES)
        self._secret = secrets.token_bytes(32)
        self._clients: dict[int, ControlConnection] = {}
        #: For ranks that have not connected yet: one that did not hear of a failure would wait for ever.
        self._queued = {rank: deque[bytes](maxlen=MOST_QUEUED) for rank in range(1, size)}
        self._acceptor = Acceptor(self._secret, Purpose.CONTROL, self._expects, size + _OTHER_CONNECTIONS)
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._local.bind(f"\0ring_plugins/{secrets.token_hex(8)}")
        self._local.listen(min(size + _OTHER_CONNECTIONS, 4096))
        self._acceptor.add(self._local)
        self._remote: socket.socket | None = None
        self._addresses = list(addresses)
        if addresses:
            address = addresses[0] if len(addresses) == 1 else ""
            self._remote = socket.create_server((address, 0), backlog=min(size + _OTHER_CONNECTIONS, 4096))
            self._acceptor.add(self._remote)
        self._selector.register(self._acceptor, selectors.EVENT_READ, self._accept)

    @property
    def address(self) -> dict[str, Any]:
        """What a `ControlClient` needs, for the first gather of the job. It holds the secret."""
        port = self._remote.getsockname()[1] if self._remote is not None else 0
        name = self._local.getsockname()
        return {"secret": self._secret.hex(), "local": name[1:].decode(), "port": port, "addresses": self._addresses}

    def only_this_host(self) -> None:
        """Close the port for other hosts: there are none."""
        if self._remote is not None:
            self._acceptor.remove(self._remote)
            self._remote = None

    def poll(self, seconds: float) -> None:
        if not self._closed:
            self._accept()  # drops connections that stay silent, even if nobody connects
        super().poll(seconds)

    def abandon(self) -> None:
        self._acceptor.close()
        super().abandon()

    def _connections(self) -> list[ControlConnection]:
        return list(self._clients.values())

    def _send(self, rank: int, message: bytes, droppable: bool) -> None:
        for client in self._connections() if rank == EVERYONE else filter(None, [self._clients.get(rank)]):
            client.send(message, droppable)
        if not droppable:
            for queue in self._queued.values() if rank == EVERYONE else filter(None, [self._queued.get(rank)]):
                queue.append(message)

    def _expects(self, claim: Claim) -> bool:
        return 0 < claim.rank < self._most and claim.rank not in self._clients

    def _accept(self) -> None:
        for new in self._acceptor.poll():
            self._join(new)

    def _join(self, new: Authenticated) -> None:
        if not self._expects(new.claim):  # a rank that connected twice at once
            new.socket.close()
            return
        enable_keepalive(new.socket)
        client = ControlConnection(new.claim.rank, FrameSocket(new.socket, Purpose.CONTROL))
        self._clients[client.rank] = client
        self._selector.register(client.frames, selectors.EVENT_READ, client)
        for message in self._queued.pop(client.rank, ()):
            client.send(message)
        self.on_joined(client.rank)
        self._read(client)  # a rank that has left meanwhile may have said goodbye, and writing to it would fail

    def _forget(self, connection: ControlConnection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.frames)
        if self._clients.get(connection.rank) is connection:
            del self._clients[connection.rank]
        connection.frames.close()

    def _say_goodbye(self) -> None:
        for client in self._connections():
            client.send(to_json(GOODBYE))
