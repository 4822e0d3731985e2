"""Which user opened the other end of a connection inside this host.

On unix sockets the kernel reports it (SO_PEERCRED, unix(7)). For TCP it lists the user of every socket of the host in
/proc/net/tcp, which takes milliseconds to read. sock_diag(7) would answer for a single connection, but not in all
containers.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Sequence


def is_same_user(connected: socket.socket) -> bool:
    """Whether this process's user opened the other end of a connection inside this host; true for other connections.

    Of a TCP connection, ask only after the other side has sent something: until it accepts, the kernel knows no user.
    """
    return are_same_user([connected])[0]


def are_same_user(connected: Sequence[socket.socket]) -> list[bool]:
    """For each connection what `is_same_user` says; they share the time that it takes."""
    found: list[bool] = []
    inside: dict[int, tuple[str, str]] = {}  # by index, the ends of TCP connections inside this host
    for i, one in enumerate(connected):
        if one.family == socket.AF_UNIX:
            found.append(is_same_unix_user(one))
            continue
        try:
            own, peer = one.getsockname(), one.getpeername()
        except OSError:
            found.append(False)  # it has closed already
            continue
        is_inside = one.family == socket.AF_INET and (peer[0].startswith("127.") or peer[0] == own[0])
        found.append(not is_inside)
        if is_inside:
            inside[i] = _as_in_table(peer), _as_in_table(own)
    if inside:
        owned = _connections_of_this_user()
        for i, ends in inside.items():
            found[i] = owned is None or ends in owned
    return found


def _connections_of_this_user() -> set[tuple[str, str]] | None:
    """Both ends of this user's open IPv4 connections, as the kernel's table shows them; None if there is no table."""
    user, established = str(os.geteuid()), "01"  # the kernel shows a closed socket as root's
    try:
        with open("/proc/net/tcp") as table:
            rows = map(str.split, table)
            return {(row[1], row[2]) for row in rows if row[3] == established and row[7] == user}
    except OSError:
        return None  # not Linux


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
