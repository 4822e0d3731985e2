"""Whoever started the job is told that a rank failed, because the exit status of an mpirun does not always tell."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from types import TracebackType

VARIABLE = "RING_STARTER"


def tell_starter(text: str) -> None:
    """Tell what started this process, if it is on this host and wants to know."""
    name = os.environ.get(VARIABLE)
    if name:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            line.sendto(text.encode()[:4096], f"\0{name}".encode())


class Starter:
    """The starter's end: a context in which ranks on this host that have `environment` may tell something.

    Attributes:
        environment: for the ranks.
    """

    def __init__(self) -> None:
        name = f"ring_plugins/{secrets.token_hex(8)}"
        self.environment = {VARIABLE: name}
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._line.bind(f"\0{name}".encode())  # in Linux's abstract namespace, which is no file
        self._line.setblocking(False)

    def heard(self) -> str | None:
        """What a rank has told, if there is something that was not asked for before."""
        with contextlib.suppress(BlockingIOError):
            return self._line.recv(4096).decode(errors="replace")
        return None

    def __enter__(self) -> Starter:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()
