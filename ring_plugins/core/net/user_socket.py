"""Sockets by which processes of one user find each other on a host: abstract ones, under random names.

They leave no file behind, but any program of the host can connect to an abstract socket, and take any name that is
free. So only sockets of the same user count (SO_PEERCRED), and the end of the name is random: the others find it in the
kernel's list of sockets, below a name that all of them know.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time

from ring_plugins.core.net.socket_owner import is_same_unix_user

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
