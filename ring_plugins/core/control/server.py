"""Rank 0's end of the control channel: one connection from every other rank."""

from __future__ import annotations

import contextlib
import resource
import secrets
import selectors
import socket
from collections.abc import Sequence
from typing import Any

from ring_plugins.core.control.channel import EVERYONE, Channel, FrameSocket, is_proof, nonce, proof
from ring_plugins.core.control.tcp_liveness import enable_keepalive

_FILES_FOR_OTHERS = 512


class _Guest(FrameSocket):
    """A connection that says which rank it is, and has to prove it."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self.rank = -1
        self.challenge = nonce()
        self.send({"nonce": self.challenge})


class ControlServer(Channel):
    """Listens, before the other ranks are told where.

    On one host it listens on a socket in Linux's abstract namespace, which is no file and no port; the port for other
    hosts is open only where there are any (`only_this_host`).

    Args:
        size: of the job.
        addresses: of this host, under which others are to connect, the likeliest first; none where there are no others.
    """

    def __init__(self, size: int, addresses: Sequence[str] = ()) -> None:
        super().__init__(0, size)
        _allow_files(size)
        self._secret = secrets.token_hex(32)
        self._guests: dict[int, _Guest] = {}
        self._strangers: set[_Guest] = set()
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._local.bind(f"\0ring_plugins/{secrets.token_hex(8)}")
        self._remote: socket.socket | None = None
        self._addresses = list(addresses)
        if addresses:
            one = addresses[0] if len(addresses) == 1 else ""
            self._remote = socket.create_server((one, 0), backlog=min(size, 4096))
        self._local.listen(min(size, 4096))
        for listener in filter(None, (self._local, self._remote)):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)

    @property
    def address(self) -> dict[str, Any]:
        """What a `Link` needs, for the first gather of the job. It holds the secret."""
        port = self._remote.getsockname()[1] if self._remote is not None else 0
        name = self._local.getsockname()
        return {"secret": self._secret, "local": name[1:].decode(), "port": port, "addresses": self._addresses}

    def only_this_host(self) -> None:
        """Close the port for other hosts: there are none."""
        if self._remote is not None:
            self._selector.unregister(self._remote)
            self._remote.close()
            self._remote = None

    @property
    def connected(self) -> list[int]:
        """Ranks that can be told something now."""
        return list(self._guests)

    def _connections(self) -> list[FrameSocket]:
        return [*self._guests.values(), *self._strangers]

    def _send(self, rank: int, message: list[Any], droppable: bool) -> None:
        to = list(self._guests.values()) if rank == EVERYONE else [self._guests[rank]] if rank in self._guests else []
        for guest in to:
            guest.send(message, droppable)

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        guest = key.data
        if guest is None:
            self._accept(key.fileobj)
            return
        for message in self._transfer(guest, events):
            if guest.rank < 0:
                self._admit(guest, message)
            elif message == ["farewell", {}]:
                self._forget(guest)
                self.on_left(guest.rank)
            else:
                self._handle(guest.rank, message)

    def _accept(self, listener: Any) -> None:
        with contextlib.suppress(OSError):
            connected, _ = listener.accept()
            enable_keepalive(connected)
            guest = _Guest(connected)
            self._strangers.add(guest)
            self._selector.register(connected, selectors.EVENT_READ, guest)

    def _admit(self, guest: _Guest, message: Any) -> None:
        """Let in who knows the secret."""
        rank = message.get("rank") if isinstance(message, dict) else None
        is_awaited = isinstance(rank, int) and 0 < rank < self.size and rank not in self._guests
        if not is_awaited or not is_proof(message.get("proof"), self._secret, "link", guest.challenge, rank):
            self._forget(guest)
            return
        assert isinstance(rank, int)
        guest.send({"proof": proof(self._secret, "hub", message.get("nonce"))})
        guest.rank, guest.trusted = rank, True
        self._strangers.discard(guest)
        self._guests[rank] = guest
        self.on_joined(rank)

    def _lose(self, connection: FrameSocket, how: str) -> None:
        assert isinstance(connection, _Guest)
        self._forget(connection)
        if connection.rank >= 0:
            self.on_lost(connection.rank, how)

    def _forget(self, guest: _Guest) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.socket)
        self._strangers.discard(guest)
        if self._guests.get(guest.rank) is guest:
            del self._guests[guest.rank]
        guest.close()

    def _farewell(self) -> None:
        for guest in self._guests.values():
            guest.send(["farewell", {}])


def _allow_files(size: int) -> None:
    """Raise the soft limit of open files where as many connections would come near it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = size + _FILES_FOR_OTHERS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
