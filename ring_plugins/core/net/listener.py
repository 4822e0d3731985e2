"""Connections between the ranks of one job, and with nobody else.

Every rank listens on one port. Who connects proves that it knows the job's secret and says which rank it is and for
what tag; the answer proves the same. Neither proof can be used a second time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base.errors import LaunchError, PeerFailed

_LONGEST = 4096
_HANDSHAKE = 5.0


class Peer(NamedTuple):
    """Where a rank listens.

    Attributes:
        host: its name, for texts.
        address: numeric, of the network that the job uses.
        port: 0 where the rank is not to be connected to.
    """

    host: str
    address: str
    port: int


class Listener:
    """One rank's listening socket and the connections that came in on it.

    Args:
        address: to listen on, "" for all; connections to others leave from there too.
        patience: seconds that a connection may take.
    """

    def __init__(self, address: str = "", patience: float = 15.0) -> None:
        self.patience = patience
        self._address = address
        self._rank, self._secret = 0, b""
        self._peers: tuple[Peer, ...] = ()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._lines: dict[tuple[int, int], socket.socket] = {}
        self._closed = threading.Event()
        _allow_files()

    def open(self, rank: int, peers: Sequence[Peer], secret: str) -> None:
        """Begin to take connections.

        Args:
            rank: of this process.
            peers: in rank order.
            secret: of the job, which nobody else knows.
        """
        self._rank, self._peers, self._secret = rank, tuple(peers), secret.encode()
        threading.Thread(target=self._accept, name="ring:switchboard", daemon=True).start()

    def line(self, peer: int, tag: int) -> socket.socket | None:
        """The connection with a rank for a tag: made here if that rank is higher, otherwise None until it has come.

        Raises:
            LaunchError: the rank cannot be reached.
            PeerFailed: it does not listen any more.
        """
        if peer > self._rank:
            return self._call(peer, tag)
        return self._lines.pop((peer, tag), None)

    def hang_up(self, tag: int) -> None:
        """Close connections for a tag that have come in and that nobody has asked for."""
        for key in [key for key in self._lines if key[1] == tag]:
            self._lines.pop(key).close()

    def close(self) -> None:
        """Take no more connections, and close those that nobody asked for."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone does not
        self._listener.close()
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    # Calling ----------------------------------------------------------------------------------------

    def _call(self, peer: int, tag: int) -> socket.socket:
        host, address, port = self._peers[peer]
        try:
            line = socket.create_connection(
                (address, port), self.patience, (self._address, 0) if self._address else None
            )
        except ConnectionRefusedError as error:
            raise PeerFailed(
                f"rank {peer} on {host} does not listen on {address}:{port} any more: it has ended, or something "
                "between the hosts refuses connections.",
                peer,
            ) from error
        except OSError as error:
            raise LaunchError(self._unreachable(peer, error)) from error
        try:
            line.settimeout(self.patience)
            challenge = _receive(line)
            own = secrets.token_hex(16)
            said = {"rank": self._rank, "to": peer, "tag": tag, "nonce": own}
            _send(line, {**said, "proof": self._prove("call", challenge["nonce"], self._rank, peer, tag, own)})
            answer = _receive(line)
        except (OSError, EOFError, ValueError, KeyError) as error:
            line.close()
            raise LaunchError(
                f"{self._who(peer)} took a connection from {self._who(self._rank)} and then did not answer ({error}): "
                "the process is stopped or has just ended, or a proxy stands between the hosts."
            ) from error
        if not _is(answer.get("proof"), self._prove("answer", own, peer, tag)):
            line.close()
            raise LaunchError(
                f"who listens at {address}:{port} is not rank {peer} of this job: {answer.get('error', 'wrong proof')}."
            )
        return _ready(line)

    def say_who_does_not_come(self, peers: Sequence[int]) -> None:
        """Raise for ranks that should have connected and did not.

        Raises:
            LaunchError: always.
        """
        raise LaunchError(
            f"{self._who(self._rank)} waited until RING_START_TIMEOUT for a connection from "
            f"{', '.join(map(self._who, peers))} to port {self.port}. A firewall between the hosts drops connections "
            "from there (all TCP ports above 1023 must be open between them), or RING_INTERFACE names a network on "
            "which they do not reach each other."
        )

    def _unreachable(self, peer: int, error: OSError) -> str:
        _, address, port = self._peers[peer]
        if isinstance(error, TimeoutError):
            why = (
                f"no answer in {self.patience:g} s. A firewall between the hosts drops connections (all TCP "
                "ports above "
                "1023 must be open between them), or the address belongs to a network on which they do not meet; "
                "RING_INTERFACE chooses another"
            )
        else:
            why = (
                f"{error.strerror or error}; there is no route between the hosts on this network. RING_INTERFACE "
                "chooses another"
            )
        return f"{self._who(self._rank)} cannot reach {self._who(peer)} at {address}:{port}: {why}."

    def _who(self, rank: int) -> str:
        return f"rank {rank} on {self._peers[rank].host}"

    # Being called -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                line, _ = self._listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                continue  # out of files for a moment, or the caller has hung up already
            # One that says nothing must not keep the others waiting.
            threading.Thread(target=self._answer, args=(line,), name="ring:handshake", daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        try:
            line.settimeout(_HANDSHAKE)
            own = secrets.token_hex(16)
            _send(line, {"nonce": own})
            said = _receive(line)
            rank, to, tag = int(said["rank"]), int(said["to"]), int(said["tag"])
            proved = self._prove("call", own, rank, to, tag, said["nonce"])
            if not _is(said.get("proof"), proved) or to != self._rank:
                _send(line, {"error": "it belongs to another job, or is another rank"})
                line.close()
                return
            _send(line, {"proof": self._prove("answer", said["nonce"], to, tag)})
            self._lines[rank, tag] = _ready(line)
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            line.close()  # a stranger, such as a port scanner
        if self._closed.is_set():
            line.close()

    def _prove(self, *said: object) -> str:
        return hmac.new(self._secret, json.dumps(said).encode(), hashlib.sha256).hexdigest()


def _is(claimed: object, right: str) -> bool:
    return isinstance(claimed, str) and hmac.compare_digest(claimed.encode(), right.encode())


def _ready(line: socket.socket) -> socket.socket:
    """A connection as transfers want it."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Buffers stay the kernel's to size: it lets them grow as the connection needs, and setting them would end that.
    line.setblocking(False)
    return line


def _send(line: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    line.sendall(struct.pack("!I", len(data)) + data)


def _receive(line: socket.socket) -> dict[str, Any]:
    (length,) = struct.unpack("!I", _exactly(line, 4))
    if length > _LONGEST:
        raise ValueError("it does not speak ring_plugins")
    message = json.loads(_exactly(line, length))
    if not isinstance(message, dict):
        raise ValueError("it does not speak ring_plugins")
    return message


def _exactly(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = line.recv(count - len(data))
        if not part:
            raise EOFError("it closed the connection")
        data += part
    return data


def _allow_files() -> None:
    """Every connection is an open file, and the usual soft limit of 1,024 is nothing to a job of hundreds of ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
