"""How the ranks of a job that ends with its first lost rank are connected to rank 0; channel.py uses both ends.

Rank 0 listens before the others learn its address, from the job's first gather. The others connect on the threads of
their channels, and try again after an error: rank 0 drops connections if it runs out of files, or if too many are
unauthenticated. After a minute they go on without.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ring_plugins.core.base.log import logger
from ring_plugins.core.linux.process import raise_open_file_limit
from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import Claim, Purpose, Rejected
from ring_plugins.core.net.frames import FrameSocket, Unreached, reach, to_json
from ring_plugins.core.net.sockets import UNIX, enable_keepalive

#: Open files that rank 0 needs beside a connection for every rank, and connections that it accepts beside them.
_OTHER_FILES, _OTHER_CONNECTIONS = 512, 64
#: Seconds to connect to an address, between two rounds over all addresses, and until a rank gives up.
_CONNECT, _PAUSE, _GIVE_UP = 2.0, 0.3, 60.0
#: Attempts before giving up: a rank that was stopped for longer than that finds its first connection dropped.
_ATTEMPTS = 5

#: The first message and the last one. Before the first, rank 0 takes the end of a connection for an attempt that has
#: failed: the other side may have given it up just when it was accepted.
HELLO: list[Any] = ["hello", {}]
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
        """Accepts the other ranks' connections; it owns the sockets from now on.

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
    end, attempts, secret = time.monotonic() + _GIVE_UP, itertools.count(1), bytes.fromhex(address["secret"])
    places = [(UNIX + address["local"], 0)] if same_host else []
    places += [(one, address["port"]) for one in address["addresses"] if address["port"]]

    def gives_up(why: Unreached) -> bool:
        is_late = next(attempts) >= _ATTEMPTS and time.monotonic() > end
        return is_over() or is_late or isinstance(why.error, Rejected)

    try:
        frames = reach(lambda: places, secret, Purpose.CONTROL, Claim(rank), _CONNECT, gives_up, _PAUSE)
    except Unreached as why:
        if not is_over():
            logger.warning(
                f"rank {rank} goes on without a control channel to rank 0 ({why}): reports lack this rank, and a "
                "failure on another host is noticed later."
            )
        return None
    enable_keepalive(frames.socket)
    frames.send(to_json(HELLO))
    return frames
