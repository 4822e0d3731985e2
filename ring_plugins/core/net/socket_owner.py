"""Which user opened the other end of a connection inside this host."""

from __future__ import annotations

import os
import socket
import struct
import sys


def is_same_user(connected: socket.socket) -> bool:
    """Whether this process's user opened the other end of a connection inside this host; true for other connections.

    Of a TCP connection, ask only after the other side has sent something: until it accepts, the kernel knows no user.
    """
    if connected.family == socket.AF_UNIX:
        return is_same_unix_user(connected)
    try:
        own, peer = connected.getsockname(), connected.getpeername()
    except OSError:
        return False  # it has closed already
    if connected.family != socket.AF_INET or not (peer[0].startswith("127.") or peer[0] == own[0]):
        return True
    try:
        with open("/proc/net/tcp") as table:
            wanted = [_as_in_table(peer), _as_in_table(own)]
            return any(words[1:3] == wanted and int(words[7]) == os.geteuid() for words in map(str.split, table))
    except OSError:
        return True  # not Linux


def _as_in_table(address: tuple[str, int]) -> str:
    """An IPv4 address and port as /proc/net/tcp shows them."""
    return f"{int.from_bytes(socket.inet_aton(address[0]), sys.byteorder):08X}:{address[1]:04X}"


def is_same_unix_user(connected: socket.socket) -> bool:
    """The same for unix sockets only; true for all others."""
    if connected.family != socket.AF_UNIX:
        return True
    credentials = struct.Struct("=iII")
    _, uid, _ = credentials.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return bool(uid == os.geteuid())
