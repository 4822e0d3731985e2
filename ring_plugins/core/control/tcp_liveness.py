"""Hosts that fall silent: a cut cable, a firewall, a host without power. Nothing says so; answers stop coming.

A host's kernel acknowledges what reaches it, whatever its processes do: one that computes for an hour, or is stopped in
a debugger, does not count as silent. So the kernel here is asked, once a second, how often it has repeated something
in vain. It knows that of all TCP connections of this process, those of MPI and NCCL too. Connections without anything
under way, such as the control channel between two messages, have the kernel ask by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.control.wait import long_waits

if TYPE_CHECKING:
    from ring_plugins.core.control.failure_detector import FailureDetector

#: Seconds between looks, and at least so many times what a look takes.
_EVERY, _RARELY = 1.0, 500
#: Repetitions in vain: fewer happen where a network is merely crowded.
_ENOUGH = 3
#: Seconds without traffic before the kernel asks whether the other host is there, and between its questions.
_IDLE, _INTERVAL = 2, 1
_ESTABLISHED = 1
_libc = ctypes.CDLL(None, use_errno=True)


def patience() -> float:
    """Seconds that a host may be silent.

    Raises:
        ArgumentError: RING_NETWORK_TIMEOUT is not a positive number.
    """
    return config.NETWORK_TIMEOUT.get()


def ask_when_idle(connected: socket.socket) -> None:
    """Let the kernel end a connection (ETIMEDOUT) when nothing is sent and the other host is no longer there."""
    if connected.family == socket.AF_UNIX:
        return
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(2, round((patience() - _IDLE) / _INTERVAL)))


class Line(NamedTuple):
    """A TCP connection by its two ends, each an address and a port."""

    here: tuple[str, int]
    there: tuple[str, int]


def unanswered() -> dict[Line, int]:
    """The connections of this process, whoever made them, on which something is being repeated, and how often."""
    found = {}
    info, length = ctypes.create_string_buffer(8), ctypes.c_uint()
    for name in os.listdir("/proc/self/fd"):
        length.value = len(info)
        # Asking every file is cheaper than finding out first which ones are sockets.
        if _libc.getsockopt(int(name), socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length)):
            continue
        # Linux's struct tcp_info begins: state, congestion state, retransmissions, probes, ... a byte each.
        state, _, repeated, probes = info.raw[:4]
        if state == _ESTABLISHED and (repeated or probes):
            here, there = (_end(int(name), ask) for ask in (_libc.getsockname, _libc.getpeername))
            if here is not None and there is not None:
                found[Line(here, there)] = max(repeated, probes)
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
    """A service of the guard that tells `watch` of hosts that acknowledge nothing any more.

    Args:
        failure_detector: what becomes of the other ranks.
        addresses: those of every rank's host, in rank order.
        look: see `unanswered`.
    """

    def __init__(
        self,
        failure_detector: FailureDetector,
        addresses: Sequence[Sequence[str]],
        look: Callable[[], dict[Line, int]] = unanswered,
    ) -> None:
        self._failure_detector, self._look = failure_detector, look
        own = set(addresses[failure_detector.rank])
        self._ranks: dict[str, list[int]] = {}
        for rank, of_host in enumerate(addresses):
            for address in of_host:
                if address not in own:
                    self._ranks.setdefault(address, []).append(rank)
        self._patience = patience()
        self._next = 0.0
        #: Since when something has been repeated on a connection, and how often it had been at the last look.
        self._since: dict[Line, tuple[float, int]] = {}

    def tick(self, now: float) -> None:
        """Look, and tell of a host once its silence has lasted."""
        if not self._ranks or now < self._next:
            return
        began = time.monotonic()
        before, self._since = self._since, {}
        for line, times in self._look().items():
            ranks = self._ranks.get(line.there[0])
            if ranks is None:
                continue
            since, last = before.get(line, (now, 0))
            since = since if times >= last else now  # something was acknowledged meanwhile
            self._since[line] = since, times
            if times >= _ENOUGH and now - since >= self._patience:
                self._failure_detector.lose_network(
                    _awaited(ranks),
                    f"{line.there[0]}, port {line.there[1]}, has acknowledged nothing from {line.here[0]}, port "
                    f"{line.here[1]}, for {now - since:.0f} s",
                )
        self._next = now + max(_EVERY, _RARELY * (time.monotonic() - began))

    def close(self) -> None:
        """Nothing to close."""


def _awaited(ranks: Sequence[int]) -> int:
    """Of ranks on one host, one that somebody here waits for, if there is such a one."""
    missing = {rank for wait in list(long_waits.values()) for rank in wait.missing}
    return next((rank for rank in ranks if rank in missing), ranks[0])
