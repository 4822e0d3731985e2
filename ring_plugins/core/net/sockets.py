"""Sockets of processes of one job: unix sockets by name, the user at the other end, and options of TCP.

**Unix sockets** by which processes of one user find each other on a host are abstract ones, under random names. They
leave no file behind, but any program of the host can connect to an abstract socket, and take any name that is free. So
only sockets of the same user count (SO_PEERCRED, unix(7)), and the end of the name is random: the others find it in the
kernel's list of sockets, below a name that all of them know.

**The user of a TCP connection** inside this host stands in /proc/net/tcp and /proc/net/tcp6, which list the user of
every socket of the host and take milliseconds to read. sock_diag(7) would answer for a single connection, but not in
all containers. The peer chooses its address: anybody can bind a socket to any address of the host and connect from
there to any other one, IPv4 and mapped into IPv6. So the address does not tell whether the peer is on this host; its
row in the table does. A connection that must have one, since one of its ends is a loopback address or both addresses
are the same, and has none, is nobody's.

**Options of TCP** (tcp(7)) say how soon lost data is repeated, and when a silent connection ends.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.linux.interfaces import own_addresses

#: Seconds for which a connection may be silent.
_PATIENCE = 2.0
#: How addresses of such sockets begin where others are numeric.
UNIX = "unix:"


def listen_below(listener: socket.socket, name: str, backlog: int) -> None:
    """Listen in Linux's abstract namespace at a random name below this one, which nobody can take first."""
    listener.bind(f"\0{name}/{os.urandom(8).hex()}")
    listener.listen(backlog)


def connect_below(name: str, seconds: float = 0.0) -> socket.socket | None:
    """A connection to a process of this user that listens below a name, None if there is none.

    Args:
        name: as for `listen_below`.
        seconds: to wait if too many others wait to be accepted.
    """
    deadline = time.monotonic() + seconds
    while True:
        is_full = False
        for one in names_below(re.escape(name)):
            try:
                if (connection := connect_to(one)) is not None:
                    return connection
            except BlockingIOError:
                is_full = True
        if not is_full or time.monotonic() > deadline:
            return None
        time.sleep(0.02)


def names_below(name: str) -> list[str]:
    """The names of sockets, anybody's, below a name, which is a regular expression."""
    with contextlib.suppress(OSError), open("/proc/net/unix", errors="replace") as table:
        found = re.findall(f"@({name}/[0-9a-f]{{16}})$", table.read(), re.MULTILINE)
        return list(dict.fromkeys(found))  # the kernel lists accepted connections, too
    return []


def connect_to(name: str) -> socket.socket | None:
    """A connection to the socket of this name, None if it is not this user's, or gone.

    Raises:
        BlockingIOError: too many others wait to be accepted.
    """
    try:
        connection = connect_here(name)
    except BlockingIOError:
        raise
    except OSError:
        return None
    connection.settimeout(_PATIENCE)
    return connection


def connect_here(name: str) -> socket.socket:
    """A connection, which does not block, to the socket of this name.

    Raises:
        BlockingIOError: too many others wait to be accepted.
        PermissionError: it is another user's.
        OSError: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(f"\0{name}")
        if not is_same_unix_user(connection):
            raise PermissionError(errno.EPERM, "another user's process listens there")
    except BaseException:
        connection.close()
        raise
    return connection


_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
#: As the tables show it; other states may be those of sockets that are closed, which show as root's.
_ESTABLISHED = 1
#: Of a user namespace that shows every user of the host under the own number.
_ALL_USERS = ["0", "0", str((1 << 32) - 1)]

#: An address and a port.
_End = tuple[str, int]


class UnknownUser(Exception):
    """The kernel does not say whose a connection inside this host is; the text is a sentence with the remedy."""


class _Row(NamedTuple):
    """A socket of this host.

    Attributes:
        remote: the other end of its connection.
        is_own: whether this user has it open, and it is connected.
    """

    remote: _End
    is_own: bool


def are_same_user(connected: Sequence[socket.socket], unknown: bool | None = None) -> list[bool]:
    """For each TCP connection, whether its other end is this user's or on another host.

    Ask only after the other side has sent something: until it accepts, the kernel knows no user.

    Args:
        connected: the connections; they share the time that this takes.
        unknown: the answer for connections inside this host if the kernel does not tell; None to raise.

    Raises:
        UnknownUser: the kernel does not tell.
    """
    found = [False] * len(connected)
    left = {i: ends for i, one in enumerate(connected) if (ends := _ends(one)) is not None}
    rows, why = dict[_End, list[_Row]](), ""
    # The first table suffices for most. Then both again: the kernel may skip a row if others go while it is read.
    for tables in (_TABLES[:1], _TABLES[1:], _TABLES):
        if not left:
            break
        why = why or _read(rows, {peer for _, peer in left.values()}, tables)
        for i, (own, peer) in list(left.items()):
            there = rows.get(peer, [])
            exact = [row for row in there if row.remote == own]
            # Between its row and this end, a packet filter may have changed the address of this end.
            there = exact or there
            if not (exact or why) and tables == _TABLES[:1]:
                continue
            if there and not why:
                found[i] = all(row.is_own for row in there)
            elif not (_is_inside(own, peer) or (why and peer[0] in own_addresses())):
                found[i] = _is_connected(connected[i])  # or its row may have gone with it
            elif not why:
                continue
            elif unknown is None:
                raise UnknownUser(
                    f"cannot tell whether the process at the other end of the connection between {own[0]}:{own[1]} and "
                    f"{peer[0]}:{peer[1]} is this user's or a stranger's on this host, as {why}. Set RING_SECRET to "
                    "the same random text on all ranks, which they prove to each other instead."
                )
            else:
                found[i] = unknown
            del left[i]
    return found


def is_same_unix_user(connected: socket.socket) -> bool:
    """Whether this process's user opened the other end of a unix socket; true for all others.

    If `why_users_are_unknown`, strangers pass, too: a handshake has to follow.
    """
    if connected.family != socket.AF_UNIX:
        return True
    credentials = struct.Struct("=iII")
    _, uid, _ = credentials.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return bool(uid == os.geteuid())


def why_users_are_unknown() -> str:
    """Why the kernel shows strangers under this process's user, "" if it does not."""
    user = str(os.geteuid())
    try:
        if user != Path("/proc/sys/kernel/overflowuid").read_text().strip():
            return ""
        if Path("/proc/self/uid_map").read_text().split() == _ALL_USERS:
            return ""
    except FileNotFoundError:  # a kernel without user namespaces
        return ""
    return f"in this user namespace all users that it does not know show as this one ({user})"


def _ends(connected: socket.socket) -> tuple[_End, _End] | None:
    """This end of a connection and the other one, None if it has closed already."""
    with contextlib.suppress(OSError):
        own, peer = connected.getsockname(), connected.getpeername()
        return (_plain(own[0]), own[1]), (_plain(peer[0]), peer[1])
    return None


def _plain(address: str) -> str:
    """A numeric address in one form, whether it is IPv4, IPv6 or IPv4 mapped into IPv6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


def _is_inside(own: _End, peer: _End) -> bool:
    """Whether both ends must be on this host."""
    return own[0] == peer[0] or any(ipaddress.ip_address(end[0]).is_loopback for end in (own, peer))


def _is_connected(one: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    return False


def _read(found: dict[_End, list[_Row]], ends: set[_End], tables: Sequence[str]) -> str:
    """Add the rows of tables with one of these ends of connections, by end; returns why they say nothing."""
    user = str(os.geteuid())
    try:
        if why := why_users_are_unknown():
            return why
        shown = {text: end for end in ends for text in _as_in_tables(end)}
        for table in tables:
            if table != _TABLES[0] and not os.path.exists(table):
                continue  # IPv6 is switched off
            with open(table) as rows:
                for row in map(str.split, rows):
                    if (end := shown.get(row[1])) is not None:
                        is_own = int(row[3], 16) == _ESTABLISHED and row[7] == user and row[9] != "0"
                        found.setdefault(end, []).append(_Row(_from_table(row[2]), is_own))
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    return ""


def _as_in_tables(end: _End) -> Iterator[str]:
    """What the tables show for an end of a connection."""
    address = ipaddress.ip_address(end[0])
    packed = [address.packed]
    if address.version == 4:
        packed.append(bytes(10) + b"\xff\xff" + address.packed)
    for one in packed:
        words = struct.unpack(f"={len(one) // 4}I", one)
        yield "".join(f"{word:08X}" for word in words) + f":{end[1]:04X}"


def _from_table(shown: str) -> _End:
    address, _, port = shown.partition(":")
    words = [int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8)]
    return _plain(str(ipaddress.ip_address(b"".join(words)))), int(port, 16)


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
    try:
        if int(_REPEATS_AT_MOST.read_text()) < _REPEATS + 3:  # the first ones follow each other faster
            return
    except (OSError, ValueError):
        return
    longest_ms = max(_SHORTEST_MS, round(config.NETWORK_TIMEOUT.get() * 1000 / _REPEATS))
    with contextlib.suppress(OSError):  # also if it is longer than by default
        connected.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, longest_ms)


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
