"""Finds hosts that have gone silent: a cut cable, a firewall, a host without power. Nobody reports these.

The problem: when a process ends, its kernel closes the connections, and peers learn it at once. When a host or the
network to it is gone, nothing arrives any more, and TCP retransmits for 15 minutes (tcp_retries2) before it reports an
error. A time-out on answers cannot be much shorter than that: a process that computes for an hour, or is stopped in a
debugger, does not answer either.

The idea: a host's kernel acknowledges what reaches it, whatever its processes do. So we ask our own kernel, not the
peer: how often has it retransmitted without an acknowledgment (TCP_INFO, tcp(7))? It knows that for every TCP
connection of this process, including those of MPI and NCCL, whose sockets we never see otherwise. A connection with
at least three retransmissions and no acknowledgment for RING_NETWORK_TIMEOUT seconds has lost its network.

Idle connections retransmit nothing, so the kernel probes those, such as the control channel (net/sockets.py).

Considered and rejected: TCP_USER_TIMEOUT (RFC 5482) does the same for one socket, but it closes the connection, and
cannot be set on sockets of MPI and NCCL before they use them. Reading /proc/net/tcp shows the counters of all
processes, and takes too long on hosts with many connections. Pings are often filtered, and take another path than the
data.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.control.wait import long_waits

if TYPE_CHECKING:
    from ring_plugins.core.control.failure_detector import FailureDetector

#: Seconds between checks, and at least this multiple of the time that a check takes.
_EVERY, _COST_FACTOR = 1.0, 500
#: Retransmissions that count as silence; congested networks cause one or two.
_ENOUGH = 3
_ESTABLISHED = 1
_libc = ctypes.CDLL(None, use_errno=True)


class TcpConnection(NamedTuple):
    """A TCP connection by its two ends, each an address and a port."""

    local: tuple[str, int]
    remote: tuple[str, int]


def retransmissions() -> dict[TcpConnection, int]:
    """Number of retransmissions of each connection of this process that is retransmitting now."""
    found = {}
    info, length = ctypes.create_string_buffer(8), ctypes.c_uint()
    for name in os.listdir("/proc/self/fd"):
        length.value = len(info)
        # Asking every file is cheaper than finding out first which ones are sockets.
        if _libc.getsockopt(int(name), socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length)):
            continue
        # Linux's struct tcp_info begins: state, congestion state, retransmissions, probes, ... one byte each.
        state, _, repeated, probes = info.raw[:4]
        if state == _ESTABLISHED and (repeated or probes):
            local, remote = (_end(int(name), ask) for ask in (_libc.getsockname, _libc.getpeername))
            if local is not None and remote is not None:
                found[TcpConnection(local, remote)] = max(repeated, probes)
    return found


def _end(fd: int, ask: Callable[..., int]) -> tuple[str, int] | None:
    memory, length = ctypes.create_string_buffer(128), ctypes.c_uint(128)
    if ask(fd, memory, ctypes.byref(length)):
        return None
    family, port = struct.unpack("=H", memory.raw[:2])[0], struct.unpack("!H", memory.raw[2:4])[0]
    if family == socket.AF_INET:
        return socket.inet_ntop(family, memory.raw[4:8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, memory.raw[8:24]).removeprefix("::ffff:"), port
    return None


class TcpLiveness:
    """A service of the monitor thread that reports silent hosts to the failure detector.

    Args:
        failure_detector: receives the reports.
        look: see `retransmissions`.
    """

    def __init__(
        self,
        failure_detector: FailureDetector,
        look: Callable[[], dict[TcpConnection, int]] = retransmissions,
    ) -> None:
        self._failure_detector, self._look = failure_detector, look
        members = failure_detector.members
        self._ranks: dict[str, list[int]] = {}
        for rank, one in members.known.items():
            for address in one.addresses:
                if address not in members.here.addresses:
                    self._ranks.setdefault(address, []).append(rank)
        self._timeout = config.NETWORK_TIMEOUT.get()
        self._next = 0.0
        #: By connection, since when it has been retransmitting, and how often it had at the last check.
        self._silent: dict[TcpConnection, tuple[float, int]] = {}

    def tick(self, now: float) -> None:
        """Report hosts that have been silent for RING_NETWORK_TIMEOUT seconds."""
        if not self._ranks or now < self._next:
            return
        began = time.monotonic()
        before, self._silent = self._silent, {}
        for connection, times in self._look().items():
            ranks = self._ranks.get(connection.remote[0])
            if ranks is None or not self._may_be_of_the_job(connection):
                continue
            since, last = before.get(connection, (now, 0))
            since = since if times >= last else now  # something was acknowledged meanwhile
            self._silent[connection] = since, times
            if times >= _ENOUGH and now - since >= self._timeout:
                (local, local_port), (remote, remote_port) = connection
                awaited = {rank for wait in list(long_waits.values()) for rank in wait.missing}
                self._failure_detector.lose_network(
                    next((rank for rank in ranks if rank in awaited), ranks[0]),
                    f"{remote}, port {remote_port}, has acknowledged nothing from {local}, port {local_port}, for "
                    f"{now - since:.0f} s",
                )
        self._next = now + max(_EVERY, _COST_FACTOR * (time.monotonic() - began))

    def _may_be_of_the_job(self, connection: TcpConnection) -> bool:
        """Whether a connection is no other one of the script, such as to a database.

        A firewall may drop that while the network lives. A job that goes on would give up a healthy host. All of its
        own connections have the port where a rank listens at one end. Of MPI and NCCL, nobody knows the ports.
        """
        mesh = self._failure_detector.mesh
        if mesh is None:
            return True
        members = self._failure_detector.members
        ports = {peer.port for peer in members.known.values()}
        return connection.local[1] == members.here.port or connection.remote[1] in ports

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
