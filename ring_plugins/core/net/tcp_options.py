"""Options of TCP connections (tcp(7)): how soon lost data is repeated, and when a silent connection ends."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from ring_plugins.core.base import config

#: Linux's TCP_RTO_MAX_MS, since 6.15, the shortest such time that it accepts, and how often data is repeated at least
#: within RING_NETWORK_TIMEOUT.
_RTO_MAX_MS, _SHORTEST_MS, _REPEATS = 44, 1000, 6
#: After how many repeats Linux ends a connection, in this network namespace. Some clusters set it to 5.
_REPEATS_AT_MOST = Path("/proc/sys/net/ipv4/tcp_retries2")
#: Seconds without traffic before the kernel probes the other host: of a connection that may be idle for long, and of
#: one that is to end soon. Between two probes, 1 s.
_IDLE, _SOON, _INTERVAL = 2, 1, 1


def configure(connected: socket.socket) -> None:
    """Let TCP send what is small at once, and soon repeat what the other host does not acknowledge.

    By default TCP waits twice as long each time: it repeats data after about 0.2, 0.6, 1.4, 3 and 6 s. If the network
    has been away for 4 s, that would find out only when RING_NETWORK_TIMEOUT is over. Older kernels do so.

    TCP ends a connection after a number of repeats (tcp_retries2, tcp(7)), so these must not follow each other too
    fast: every second, that would be after 15 s, however long RING_NETWORK_TIMEOUT is. Where few repeats are allowed,
    TCP keeps its own times. Unix sockets lose nothing.
    """
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not _has_repeats_left():
        return
    longest_ms = max(_SHORTEST_MS, round(config.NETWORK_TIMEOUT.get() * 1000 / _REPEATS))
    with contextlib.suppress(OSError):  # also if it is longer than by default
        connected.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, longest_ms)


def _has_repeats_left() -> bool:
    """Whether Linux allows some more repeats than those within RING_NETWORK_TIMEOUT."""
    try:
        return int(_REPEATS_AT_MOST.read_text()) >= _REPEATS + 3  # the first ones follow each other faster
    except (OSError, ValueError):
        return False


def enable_keepalive(connected: socket.socket) -> None:
    """Let the kernel end an idle connection (ETIMEDOUT) if the other host stays silent for RING_NETWORK_TIMEOUT."""
    if connected.family == socket.AF_UNIX:
        return
    probes = max(2, round((config.NETWORK_TIMEOUT.get() - _IDLE) / _INTERVAL))
    with contextlib.suppress(OSError):
        _probe(connected, _IDLE)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def end_when_silent(connected: socket.socket) -> None:
    """Let the kernel end a connection, idle or not, if the other host is silent for RING_NETWORK_TIMEOUT."""
    if connected.family == socket.AF_UNIX:
        return
    _probe(connected, _SOON)
    milliseconds = int(config.NETWORK_TIMEOUT.get() * 1000)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _probe(connected: socket.socket, idle: int) -> None:
    """Have the kernel probe the other host after so many seconds without traffic."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
