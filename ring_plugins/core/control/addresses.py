"""Under which addresses other hosts may reach this one, and sockets that notice when they no longer do."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

#: Linux: address of an interface.
_SIOCGIFADDR = 0x8915
#: Seconds of silence before asking whether the other host is there, between questions, and how many go unanswered:
#: 30 seconds in all, longer than a switch takes to restart a port.
_IDLE, _INTERVAL, _COUNT = 10, 5, 4


def own_addresses() -> list[str]:
    """IPv4 addresses of this host that are no loopback.

    That of RING_INTERFACE comes first, then those of the launcher's rendezvous and of the host's name.
    """
    chosen = os.environ.get("RING_INTERFACE", "")
    found: list[str] = [_address_of(chosen)] if chosen else []
    for name in (os.environ.get("MASTER_ADDR", ""), socket.gethostname()):
        if name:
            with contextlib.suppress(OSError):
                found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)]
    mine = [address for _, interface in socket.if_nameindex() if (address := _address_of(interface))]
    named = [address for address in found if address in mine]
    return [address for address in dict.fromkeys([*named, *mine]) if not address.startswith("127.")]


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def keep_alive(connected: socket.socket) -> None:
    """Let the kernel find out when the other host is no longer there; a process that is stopped does not count."""
    if connected.family == socket.AF_UNIX:
        return
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _COUNT)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_IDLE + _INTERVAL * _COUNT))
