"""Connections between the ranks of one job, for data.

Every rank listens on one port, or on a unix socket if all are on one host. Of two ranks the lower one connects, once
for each tag, and both ends authenticate themselves (see auth.py). Nothing here waits for another rank. Connecting is
polled, as moving bytes is, so a rank connects to many peers at once, and a rank that waits for them still notices
failures.

One thread accepts for the whole process, because a rank must answer connecting ranks while it computes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterable, Sequence

from ring_plugins.core.base.errors import LaunchError, PeerFailed
from ring_plugins.core.base.member import Member
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.linux.process import raise_open_file_limit
from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import (
    HANDSHAKE_SECONDS,
    Claim,
    ClientHandshake,
    Disconnected,
    Purpose,
    Rejected,
    advance,
)
from ring_plugins.core.net.sockets import UNIX, configure, connect_here

#: Seconds before the next attempt to connect, after a peer dropped one before it answered.
_RETRY_SECONDS = 0.05
#: Seconds that a connection lasts which is dropped because one of its ends was held up, by a debugger or native code
#: that holds the GIL: a rank drops what does not authenticate itself within `HANDSHAKE_SECONDS`. Others are dropped at
#: once.
_HELD_UP = HANDSHAKE_SECONDS / 2
#: Linux's IP_BIND_ADDRESS_NO_PORT, which Python names from 3.12. Without it, binding a socket to an address reserves a
#: port on the whole host, and the 28,000 ephemeral ports do not suffice for 64 ranks a host that connect to hundreds of
#: others. With it, `connect` picks a port that need only be unused towards that peer.
_IP_BIND_ADDRESS_NO_PORT = 24


class Listener:
    """One rank's listening socket, the connections that came in on it, and those that it makes to others.

    Args:
        address: to listen on, "" for all; connections to others leave from there too. `UNIX` for ranks of this host.
        patience: seconds after which a host that does not react counts as unreachable.

    Attributes:
        address, port: where it listens.
        peers: the ranks that this process knows, by rank.
    """

    def __init__(self, address: str = "", patience: float = 15.0) -> None:
        self.patience = patience
        self.address, self.port = address, 0
        self._rank, self._secret = 0, b""
        self.peers: dict[int, Member] = {}
        if address == UNIX:
            self.address += f"ring_plugins/{secrets.token_hex(8)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind("\0" + self.address.removeprefix(UNIX))
            self._listener.listen(1024)
        else:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, 0), family=family, backlog=1024)
            self.port = self._listener.getsockname()[1]
        #: By rank and tag.
        self._accepted: dict[tuple[int, int], socket.socket] = {}
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        raise_open_file_limit()

    def open(self, rank: int, peers: Iterable[Member], secret: str, accepts_all: bool = False) -> None:
        """Begin to accept connections.

        Args:
            rank: of this process.
            peers: all ranks that may connect.
            secret: of the job.
            accepts_all: whether higher ranks may connect, too, as they do to a process that is to join them.
        """
        self._rank, self._secret = rank, secret.encode()
        self.peers = {one.rank: one for one in peers}
        acceptor = Acceptor(
            self._secret,
            Purpose.DATA,
            lambda claim: claim.target == rank and (0 <= claim.rank < rank or (accepts_all and claim.rank > rank)),
            limit=len(self.peers) + 64,
        )
        acceptor.add(self._listener)
        self._thread = HelperThread(self._accept, "ring:listener", (acceptor,))
        self._thread.start()

    def connection(self, peer: int, tag: int, connects: bool | None = None) -> socket.socket | None:
        """The connection with a rank for a tag, returned once; None while there is none yet.

        The lower rank connects. So with a higher `peer` this call begins to connect and the next ones continue; with a
        lower one they find out whether it has connected.

        Args:
            peer, tag: of the connection.
            connects: whether this rank connects, if it is not the lower one that does.

        Raises:
            LaunchError: the rank cannot be reached.
            PeerFailed: it does not listen any more.
        """
        if not (peer > self._rank if connects is None else connects):
            return self._accepted.pop((peer, tag), None)
        attempt = self._attempts.get((peer, tag))
        if attempt is None:
            claim = Claim(self._rank, peer, tag)
            attempt = _Attempt(self.address, self.peers[peer], self._secret, claim, self.patience)
            self._attempts[peer, tag] = attempt
        try:
            connected = attempt.advance()
        except (OSError, Disconnected) as error:
            del self._attempts[peer, tag]
            raise self._failure(peer, error) from error
        if connected is not None:
            del self._attempts[peer, tag]
        return connected

    @property
    def secret(self) -> str:
        """Of the job, for processes that join it later."""
        return self._secret.decode()

    def add(self, peer: Member) -> None:
        """From now on, this rank may connect to another one."""
        self.peers = {**self.peers, peer.rank: peer}

    def take_accepted(self, tag: int) -> dict[int, socket.socket]:
        """The connections of lower ranks for a tag, by rank; each is returned once."""
        found = {rank: self._accepted.pop((rank, tag), None) for rank, of in list(self._accepted) if of == tag}
        return {rank: connected for rank, connected in found.items() if connected is not None}

    def close_tag(self, tag: int) -> None:
        """Close connections for a tag that were never asked for, and abandon those being made."""
        for key in [key for key in list(self._accepted) if key[1] == tag]:  # the thread may add to it meanwhile
            self._accepted.pop(key).close()
        for key in [key for key in self._attempts if key[1] == tag]:
            self._attempts.pop(key).close()

    def close(self) -> None:
        """Accept no more connections, and close those that were never asked for."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone does not
        if self._thread is None:
            self._listener.close()
        else:
            self._thread.join(1.0)
        for connected in self._accepted.values():
            connected.close()
        for attempt in self._attempts.values():
            attempt.close()
        self._accepted.clear()
        self._attempts.clear()

    def detach_after_fork(self) -> None:
        """In a forked child: close the port, or others would find it open after the parent's death."""
        self._listener.close()

    def raise_missing(self, peers: Sequence[int]) -> None:
        """Raise the error for ranks that have not connected within RING_START_TIMEOUT.

        Raises:
            LaunchError: always.
        """
        for (peer, _), attempt in list(self._attempts.items()):
            if peer in peers and not attempt.has_reached_host:
                raise self._failure(peer, TimeoutError(errno.ETIMEDOUT, "no answer"))
        lower, higher = [peer for peer in peers if peer < self._rank], [peer for peer in peers if peer > self._rank]
        if not lower:
            raise LaunchError(
                f"{', '.join(map(self._name, higher))} accepted a connection from {self._name(self._rank)} but did not "
                "answer within RING_START_TIMEOUT: the process is stopped, or a proxy stands between the hosts."
            )
        raise LaunchError(
            f"{self._name(self._rank)} timed out after RING_START_TIMEOUT waiting for a connection from "
            f"{', '.join(map(self._name, lower))} to port {self.port}. A firewall between the hosts drops connections "
            "from there (all TCP ports above 1023 must be open between them), or RING_INTERFACE names a network on "
            "which they cannot reach each other."
        )

    def _accept(self, acceptor: Acceptor) -> None:
        while not self._closed.is_set():
            for connected, claim, _ in acceptor.poll(60.0):
                old = self._accepted.pop((claim.rank, claim.tag), None)
                if old is not None:  # an earlier attempt of that rank, which it gave up
                    old.close()
                self._accepted[claim.rank, claim.tag] = _ready(connected)
        acceptor.close()
        for connected in list(self._accepted.values()):  # accepted while `close` ran
            connected.close()

    def _failure(self, peer: int, error: OSError | Disconnected) -> LaunchError | PeerFailed:
        where = self.peers[peer]
        host, address, port = where.host, where.address, where.port
        if isinstance(error, ConnectionRefusedError):
            return PeerFailed(
                f"rank {peer} on {host} does not listen on {address}:{port} any more: it has ended, or something "
                "between the hosts refuses connections.",
                peer,
            )
        if isinstance(error, Rejected):
            return LaunchError(
                f"the process that listens at {address}:{port} is not rank {peer} of this job on {host}: {error}."
            )
        if isinstance(error, Disconnected):
            return LaunchError(
                f"{self._name(peer)} accepted a connection from {self._name(self._rank)} but did not answer "
                f"({error}): the process has just ended, or a proxy stands between the hosts."
            )
        if isinstance(error, TimeoutError):
            why = (
                f"no answer in {self.patience:g} s. A firewall between the hosts drops connections (all TCP ports "
                "above 1023 must be open between them), or the address belongs to a network that does not "
                "connect them; RING_INTERFACE chooses another"
            )
        else:
            why = (
                f"{error.strerror or error}; there is no route between the hosts on this network. RING_INTERFACE "
                "chooses another"
            )
        return LaunchError(f"{self._name(self._rank)} cannot reach {self._name(peer)} at {address}:{port}: {why}.")

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.peers[rank].host}"


class _Attempt:
    """A connection that is being made: first TCP's handshake, then ours.

    If the peer drops it in between, it is tried again: a peer with too many unauthenticated connections drops the
    oldest, and one that was stopped drops those that have become too old. How long that may go on is the caller's
    business, unless connections are dropped at once, again and again: then something else listens there.

    Args:
        source: numeric address to connect from, "" for any.
        peer: to connect to.
        secret, claim: for the handshake.
        patience: seconds that the peer's host may take to react, and that connections may be dropped at once.

    Attributes:
        has_reached_host: whether TCP's handshake is over.
    """

    def __init__(self, source: str, peer: Member, secret: bytes, claim: Claim, patience: float) -> None:
        self._source, self._peer, self._secret, self._claim = source, peer, secret, claim
        self._patience = patience
        self._began = self._dropped_at = self._pause_until = 0.0
        self._socket: socket.socket | None = None
        self._handshake = ClientHandshake(secret, Purpose.DATA, claim)
        self.has_reached_host = False

    def advance(self) -> socket.socket | None:
        """The connection once both handshakes are over; never waits for them.

        Raises:
            OSError: the peer cannot be reached.
            Rejected, Disconnected: see `auth.advance`.
        """
        if self._socket is None and time.monotonic() < self._pause_until:
            return None
        try:
            self._socket = self._socket or self._begin()
            if not self.has_reached_host and not self._connects(self._socket):
                return None
            return _ready(self._socket) if advance(self._socket, self._handshake) else None
        except Disconnected as error:
            self.close()
            now = time.monotonic()
            self._dropped_at = (self._dropped_at or now) if now - self._began < _HELD_UP else 0.0
            if isinstance(error, Rejected) or (self._dropped_at and now - self._dropped_at > self._patience):
                raise
            self._pause_until = now + _RETRY_SECONDS
            return None
        except BaseException:
            self.close()
            raise

    def _begin(self) -> socket.socket:
        self._began, self.has_reached_host = time.monotonic(), False
        self._handshake = ClientHandshake(self._secret, Purpose.DATA, self._claim)
        if self._peer.address.startswith(UNIX):
            try:
                return connect_here(self._peer.address.removeprefix(UNIX))
            except (BlockingIOError, PermissionError) as error:
                raise Disconnected.by(error) from error
        family, kind, protocol, _, to = socket.getaddrinfo(
            self._peer.address, self._peer.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        connecting = socket.socket(family, kind, protocol)
        try:
            connecting.setblocking(False)
            if self._source:
                bind_without_port(connecting, self._source)
            with contextlib.suppress(BlockingIOError):
                connecting.connect(to)
        except BaseException:
            connecting.close()
            raise
        return connecting

    def _connects(self, connecting: socket.socket) -> bool:
        poll = select.poll()
        poll.register(connecting, select.POLLOUT)
        if not poll.poll(0):
            if time.monotonic() - self._began > self._patience:
                raise TimeoutError(errno.ETIMEDOUT, "no answer")
            return False
        error = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))  # makes the subclass for this number
        self.has_reached_host = True
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def bind_without_port(connecting: socket.socket, source: str) -> None:
    """Bind a socket that is to connect to an address, and leave the port to `connect`."""
    with contextlib.suppress(OSError):  # not Linux
        connecting.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
    connecting.bind((source, 0))


def _ready(connected: socket.socket) -> socket.socket:
    """Configure a connection for transfers."""
    configure(connected)
    # The kernel tunes buffer sizes itself; setting them would turn that off.
    connected.setblocking(False)
    return connected
