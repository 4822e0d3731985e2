"""How a command reaches a running process of the same user and host: `ring add-ranks` and `ring top`.

A process that answers listens at a socket in Linux's abstract namespace, whose name has what it answers, its user, its
process id and something random: it leaves no file behind, nobody can take the name first, and /proc/net/unix lists all
such processes. Any program of the host can connect there, so both sides ask the kernel for the other's user
(SO_PEERCRED), and take nothing from anybody else; the secret of the handshake is empty.

The process looks at the socket between its other work. It never waits for whoever has connected.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from ring_plugins.core.base.errors import quoted
from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import Claim, ClientHandshake, Purpose, authenticate
from ring_plugins.core.net.frames import FrameSocket
from ring_plugins.core.net.peers import Peers
from ring_plugins.core.net.sockets import connect_below, connect_to, listen_below, names_below, why_users_are_unknown

#: Seconds for which the processes of a host are looked for.
_PATIENCE = 2.0
#: Connections at once.
_MOST = 8


def _name(service: str, pid: int | str) -> str:
    return f"ring_plugins/{service}/{os.geteuid()}/{pid}"


class LocalService:
    """The end of the process that answers.

    Args:
        service: what it answers, such as "run".
        longest: bytes of the longest request.
    """

    def __init__(self, service: str, longest: int) -> None:
        self._longest, self._numbers = longest, itertools.count()
        listener = socket.socket(socket.AF_UNIX)
        listen_below(listener, _name(service, os.getpid()), _MOST)
        acceptor = Acceptor(b"", Purpose.LAUNCHER, lambda claim: not why_users_are_unknown(), limit=_MOST)
        acceptor.add(listener)
        self._peers = Peers(acceptor)

    def poll(self) -> Iterator[tuple[int, bytes]]:
        """The requests that have come, with the number of who asks."""
        ready = self._peers.wait(0.0)
        for new in self._peers.accepted():
            for oldest in list(self._peers)[: 1 - _MOST]:
                self._peers.hang_up(oldest)
            self._peers.add(next(self._numbers), FrameSocket(new.socket, Purpose.LAUNCHER, self._longest))
        for number, event in self._peers.events(ready):
            if isinstance(event, bytes):
                yield number, event

    def __iter__(self) -> Iterator[int]:
        return iter(self._peers)

    def send(self, number: int, text: str) -> None:
        """Answer; what is not read in time is dropped."""
        self._peers.send(number, text.encode(), droppable=True)

    def hang_up(self, number: int) -> None:
        self._peers.hang_up(number)

    def close(self) -> None:
        self._peers.close()

    def abandon(self) -> None:
        """Close all sockets at once, as a forked child must."""
        self._peers.abandon()


def processes(service: str) -> dict[int, list[str]]:
    """This user's processes on this host that answer: the words of their commands by process id."""
    found, deadline = (
        dict[int, list[str]](),
        time.monotonic() + _PATIENCE,
    )  # for all: others may list what never accepts
    left = names_below(_name(service, "[0-9]+"))
    while left and time.monotonic() < deadline:
        full = []
        for one in left:
            try:
                connection = connect_to(one)
            except BlockingIOError:
                full.append(one)
                continue
            if connection is None:  # only another user says that it runs, or it has just ended
                continue
            connection.close()
            pid = int(one.split("/")[-2])
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                found[pid] = [quoted(word.decode(errors="replace")) for word in words]
        left = full
        time.sleep(0.02 if left else 0.0)
    return found


def connected(service: str, pid: int, longest: int, seconds: float) -> FrameSocket | None:
    """A connection to a process that answers; None if there is none.

    Args:
        service: what it answers.
        pid: its process id.
        longest: bytes of its longest answer.
        seconds: to wait.

    Raises:
        OSError, Disconnected: it does not answer.
    """
    connection = connect_below(_name(service, pid), seconds)
    if connection is None:
        return None
    try:
        authenticate(connection, ClientHandshake(b"", Purpose.LAUNCHER, Claim(0)), seconds)
    except BaseException:
        connection.close()
        raise
    return FrameSocket(connection, Purpose.LAUNCHER, longest)
