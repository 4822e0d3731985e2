"""How the ranks of a job that ends with its first lost rank are connected to rank 0; channel.py uses both ends.

Rank 0 listens before the others learn its address, from the job's first gather. The others connect on the threads of
their channels, and try again after an error: rank 0 drops connections if it runs out of files, or if too many are
unauthenticated. After a minute they go on without.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ring_plugins.core.base.log import logger
from ring_plugins.core.linux.process import raise_open_file_limit
from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import Claim, ClientHandshake, Disconnected, Purpose, Rejected, advance, wait_for
from ring_plugins.core.net.frames import FrameSocket, to_json
from ring_plugins.core.net.socket_owner import is_same_unix_user
from ring_plugins.core.net.tcp_options import enable_keepalive

#: Open files that rank 0 needs beside a connection for every rank, and connections that it accepts beside them.
_OTHER_FILES, _OTHER_CONNECTIONS = 512, 64
#: Seconds to connect to an address, between two rounds over all addresses, and until a rank gives up.
_CONNECT, _PAUSE, _GIVE_UP = 1.0, 0.5, 60.0
#: Attempts before giving up: a rank that was stopped for longer than that finds its first connection dropped.
_ATTEMPTS = 5
#: Seconds between two looks whether to stop.
_LOOK = 0.02

#: The last message on a connection.
GOODBYE: list[Any] = ["goodbye", {}]


class RankZero:
    """Where rank 0 listens.

    Ranks of its host use a socket in Linux's abstract namespace, which takes neither a file nor a port. The port for
    other hosts is closed if there are none (`only_this_host`).

    Args:
        size: of the job.
        addresses: of this host, for other hosts to connect to, the likeliest first; empty if there are none.
    """

    def __init__(self, size: int, addresses: Sequence[str] = ()) -> None:
        self._size, self._secret, self._addresses = size, secrets.token_bytes(32), list(addresses)
        raise_open_file_limit(size + _OTHER_FILES)
        backlog = min(size + _OTHER_CONNECTIONS, 4096)
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._local.bind(f"\0ring_plugins/{secrets.token_hex(8)}")
        self._local.listen(backlog)
        self._remote: socket.socket | None = None
        if addresses:
            self._remote = socket.create_server((addresses[0] if len(addresses) == 1 else "", 0), backlog=backlog)

    @property
    def address(self) -> dict[str, Any]:
        """What `connect` needs, for the first gather of the job. It holds the secret."""
        port = self._remote.getsockname()[1] if self._remote is not None else 0
        name = self._local.getsockname()
        return {"secret": self._secret.hex(), "local": name[1:].decode(), "port": port, "addresses": self._addresses}

    def only_this_host(self) -> None:
        """Close the port for other hosts: there are none."""
        if self._remote is not None:
            self._remote.close()
            self._remote = None

    def acceptor(self, is_connected: Callable[[int], bool]) -> Acceptor:
        """Of the other ranks' connections; it owns the sockets from now on.

        Args:
            is_connected: whether a rank has a connection, and needs no other.
        """

        def expects(claim: Claim) -> bool:
            return 0 < claim.rank < self._size and not is_connected(claim.rank)

        made = Acceptor(self._secret, Purpose.CONTROL, expects, self._size + _OTHER_CONNECTIONS)
        made.add(self._local)
        if self._remote is not None:
            made.add(self._remote)
        return made


def connect(rank: int, address: Mapping[str, Any], same_host: bool, is_over: Callable[[], bool]) -> FrameSocket | None:
    """The connection of another rank to rank 0; None if it gives up, and has said why.

    Args:
        rank: of this process.
        address: of rank 0.
        same_host: whether that is on this host.
        is_over: whether this rank leaves already.
    """
    began, attempts = time.monotonic(), 0
    while not is_over():
        connected, why = _reach(address, same_host)
        is_final = False
        if connected is not None:
            handshake = ClientHandshake(bytes.fromhex(address["secret"]), Purpose.CONTROL, Claim(rank))
            try:
                return _authenticated(connected, handshake, is_over)
            except Disconnected as error:
                connected.close()
                why, is_final = str(error), isinstance(error, Rejected)
        attempts += 1
        if is_final or (attempts >= _ATTEMPTS and time.monotonic() - began > _GIVE_UP):
            logger.warning(
                f"rank {rank} goes on without a control channel to rank 0 ({why}): reports lack this rank, and a "
                "failure on another host is noticed later."
            )
            return None
        end = time.monotonic() + _PAUSE
        while not is_over() and time.monotonic() < end:
            time.sleep(_LOOK)
    return None


def _reach(address: Mapping[str, Any], same_host: bool) -> tuple[socket.socket | None, str]:
    why = "rank 0 is on this host but does not listen"
    if same_host:
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            local.settimeout(_CONNECT)
            local.connect("\0" + address["local"])
            if is_same_unix_user(local):
                return local, ""
            why = "another user's process listens in place of rank 0"
        except OSError:
            pass
        local.close()
    for one in address["addresses"] if address["port"] else ():
        try:
            return socket.create_connection((one, address["port"]), timeout=_CONNECT), ""
        except OSError as error:
            why = f"{one} port {address['port']}: {error}"
    return None, why


def _authenticated(
    connected: socket.socket, handshake: ClientHandshake, is_over: Callable[[], bool]
) -> FrameSocket | None:
    """The connection once rank 0 has answered; None if this rank leaves before."""
    enable_keepalive(connected)
    connected.setblocking(False)
    while not advance(connected, handshake):
        if is_over():
            if handshake.has_proved:  # rank 0 would take a close right after the proof for a failure
                frames = FrameSocket(connected, Purpose.CONTROL)
                frames.send(to_json(GOODBYE))
                frames.write()
            connected.close()
            return None
        wait_for(connected, select.POLLIN, _LOOK)
    return FrameSocket(connected, Purpose.CONTROL)
