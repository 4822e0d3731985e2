"""A process that is one rank of a job, and the pipe through which it gets its work and says how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from ring_plugins.core.rendezvous.spawn import ending
from ring_plugins.launcher.outcomes import Failure, Outcome

_START = "from ring_plugins.launcher.worker import main; main({fd}, {parent}, {rank})"


class RankProcess:
    """A fresh process of this Python. It ends with the thread that started it.

    Args:
        rank: its number.
        environment: all its variables; PYTHONPATH is added.
        pass_fds: further files that it inherits.
        stdout, stderr: as for Popen.

    Attributes:
        connection: gives `Outcome`, or ends when the process does.
    """

    def __init__(
        self,
        rank: int,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        self.rank = rank
        ours, theirs = Pipe()
        self.connection: Connection[Any, Any] = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START.format(fd=theirs.fileno(), parent=os.getpid(), rank=rank)],
                env={**environment, "PYTHONPATH": os.pathsep.join(search_path())},
                pass_fds=[*pass_fds, theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                # Ctrl-C interrupts the starter, which ends the ranks: they need not all say that they were.
                start_new_session=True,
            )

    def work(self, packed: bytes) -> None:
        """Hand out the function, as `outcomes.pack` made it of `(function, args, kwargs)`."""
        with contextlib.suppress(OSError):  # the process has died already, which `outcome` finds
            self.connection.send(search_path())
            self.connection.send_bytes(packed)

    def outcome(self) -> Outcome:
        """How it ended; waits for that."""
        try:
            outcome = self.connection.recv()
            assert isinstance(outcome, Outcome)
            return outcome
        except (EOFError, OSError):
            how = ending(self._process.wait())
            return Outcome(self.rank, failure=Failure(socket.gethostname(), f"its process ended with {how}"))

    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill it, and what it started itself."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()


def search_path() -> list[str]:
    """Where this process finds modules, in words that hold elsewhere."""
    return [path or os.getcwd() for path in sys.path]
