"""Tells the process that started a job that a rank failed: mpirun's exit status does not always show it.

The launcher makes an anonymous file in memory (memfd) and names it in the ranks' environment. A rank that fails opens
it through /proc, if it runs on the launcher's host, and appends its reason. The kernel lets only processes of the same
user open files that way.

A rank first compares the file's random name. On another host, or once the launcher has ended, the same process id and
number may be any file of the user's.

Considered and left: a datagram socket in Linux's abstract namespace. Any user may send to it, and although the receiver
can ask for the sender's user (SCM_CREDENTIALS), anyone can fill its queue so that no rank's message arrives.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from types import TracebackType

from ring_plugins.core.base import config

#: Bytes of one message, and of all messages; only the first one is read.
_LONGEST, _ENOUGH = 4096, 1 << 20
_END = b"\0"


def notify_parent(text: str) -> None:
    """Send a message to the launcher, if it is on this host and has a `ParentNotifier`."""
    with contextlib.suppress(OSError, ValueError):
        pid, number, name = config.PARENT_NOTIFIER.get().split(":")
        path = f"/proc/{int(pid)}/fd/{int(number)}"
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            return
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size < _ENOUGH:
                os.write(file, text.encode(errors="replace")[:_LONGEST] + _END)
        finally:
            os.close(file)


class ParentNotifier:
    """The launcher's end: receives messages of ranks on this host that have `environment`.

    Attributes:
        environment: for the ranks.
    """

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self._file = -1
        if hasattr(os, "memfd_create"):
            name = f"ring_plugins/{secrets.token_hex(16)}"
            self._file = os.memfd_create(name)
            self.environment[config.PARENT_NOTIFIER.name] = f"{os.getpid()}:{self._file}:{name}"

    def first_message(self) -> str | None:
        """The message of the rank that failed first, None if there is none."""
        if self._file < 0:
            return None
        text, end, _ = os.pread(self._file, _LONGEST + 1, 0).partition(_END)
        return text.decode(errors="replace") if end else None

    def __enter__(self) -> ParentNotifier:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
