"""Keeps child processes of a rank from joining the job as that rank a second time.

A data loader's worker that is spawned (or comes from a fork server) runs the script again from its first line. It
inherits everything by which `init` finds its rank, so a script without a `__main__` guard would join in the worker too:
MPI would be initialized twice as one rank, or a second process would answer at the rank's addresses, and the job hangs
or crashes.

So a rank holds an anonymous file while it is in the job (`RankMarker`), and `init` looks in /proc for such a file among
the open files of this process's ancestors. Finding one proves that an ancestor is a live rank. The environment alone
proves nothing, since a fork server keeps the environment of its own start.

Not every such process is a mistake. Lightning, `torch.multiprocessing.spawn` and others start ranks with
multiprocessing: these get launch variables of their own after their start, which differ from those that they inherited.

Other programs that a rank starts are recognized by their environment (launchers.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux.process import parent

_NAME = "ring_plugins/rank"
_GUARD = """Start the training under a guard, which only the ranks pass:

    if __name__ == "__main__":
        main()
"""


class RankMarker:
    """An anonymous file that a process holds while it is a rank.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        self._pid = os.getpid()
        self._file = -1
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create(_NAME)
            os.write(self._file, str(rank).encode())

    def release(self) -> None:
        """Give the rank up."""
        if self._file >= 0 and self._pid == os.getpid():
            os.close(self._file)
            self._file = -1


def check_ancestors(names: Sequence[str]) -> None:
    """Refuse to join a job in a process of multiprocessing in the place of the rank that it descends from.

    Args:
        names: of variables by which launchers tell processes their ranks, and which job they belong to.

    Raises:
        LaunchError: an ancestor is a rank, and this process has no launch variables of its own.
    """
    at_start = _environment_at_start() if is_multiprocessing_child() else {}
    if not at_start or any((os.environ.get(name) or "") != at_start.get(name, "") for name in names):
        return
    for pid, rank in _ranks_above():
        raise LaunchError(
            f"this process is a child of rank {rank} (process {pid}), such as a data loader's worker, and runs the "
            f"script again from its start. {_GUARD}"
        )


def check_is_original_script() -> None:
    """Refuse to spawn ranks from a process of multiprocessing, whose command does not start the script.

    Raises:
        LaunchError: this is such a process.
    """
    if is_multiprocessing_child():
        raise LaunchError(
            "this process was started by multiprocessing (a data loader's worker?), so ring_plugins.init() cannot "
            f"spawn ranks from it. {_GUARD}"
        )


def is_multiprocessing_child() -> bool:
    """Whether multiprocessing, or a library that starts processes like it (joblib), has started this process."""
    module: Any = sys.modules.get("multiprocessing.process")
    if module is not None and module.parent_process() is not None:
        return True
    # joblib's processes have no `parent_process`, but they too run the parent's script again under this name.
    return getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__"


def _environment_at_start() -> dict[str, str]:
    """The environment that this process got when it was started."""
    found = {}
    with contextlib.suppress(OSError):
        for item in Path("/proc/self/environ").read_bytes().split(b"\0"):
            name, _, value = os.fsdecode(item).partition("=")
            found[name] = value
    return found


def _ranks_above() -> Iterator[tuple[int, str]]:
    """Process id and rank of each ancestor that is a rank, the nearest first."""
    pid = os.getppid()
    while pid > 1:
        with contextlib.suppress(OSError):  # of another user, or ended meanwhile
            for file in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(file) == f"/memfd:{_NAME} (deleted)":
                    yield pid, file.read_text()
        pid = parent(pid)
