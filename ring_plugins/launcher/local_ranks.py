"""Runs a call on ranks of this host: fresh processes of this Python, which meet in shared memory.

Each process has a pipe to the one that started it: the module search path and the packed call go in, one `Outcome`
comes out. A pipe that ends without an outcome means that the process died, and its exit status says how.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any

from ring_plugins.core.base.log import flush_output
from ring_plugins.core.base.own_python import own_python, search_path
from ring_plugins.core.linux.process import end_with_parent
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous import record
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment, ending
from ring_plugins.launcher.environment import search_path_of_user, take_search_path
from ring_plugins.launcher.outcomes import GRACE_SECONDS, Failure, Outcome, call, collect
from ring_plugins.launcher.output import Relay

_START = "from ring_plugins.launcher.local_ranks import run_rank; run_rank({fd}, {parent}, {rank}, {by!r})"


class LocalRanks:
    """The processes of one call. Leaving the context ends all of them.

    Args:
        ranks: number of ranks.
        environment: variables of all ranks; each rank's own ones are added.
        relay: receives what they print.
    """

    def __init__(self, ranks: int, environment: Mapping[str, str], relay: Relay) -> None:
        segment = Segment.create(SharedMemoryRendezvous.nbytes(ranks))
        self._processes: list[RankProcess] = []
        try:
            for rank in range(ranks):
                own = {**environment, **child_environment(segment, rank, ranks, os.getpid())}
                self._processes.append(RankProcess(rank, own, [segment.fd], *relay.files(rank)))
            relay.start()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> LocalRanks:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end(patience=GRACE_SECONDS if kind is None else 0.0)

    def outcomes(self, packed: bytes, timeout: float | None) -> list[Outcome]:
        """Send the call to every rank and collect the outcomes, in the order of their arrival.

        Args:
            packed: what `outcomes.pack_call` made.
            timeout: seconds for all ranks to finish, None for no limit.

        Raises:
            TimeoutExceeded: the time has passed.
        """
        for process in self._processes:
            process.send_call(packed)
        waiting = {process.connection: process for process in self._processes}

        def poll(seconds: float) -> Iterator[Outcome]:
            for ready in wait(list(waiting), seconds):
                yield waiting.pop(ready).outcome()  # type: ignore[call-overload]  # of a Connection, as was given

        return collect(len(self._processes), poll, timeout)

    def _end(self, patience: float = 0.0) -> None:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not all(process.has_ended() for process in self._processes):
            time.sleep(0.005)
        for process in self._processes:
            process.kill()


class RankProcess:
    """One rank: a fresh process of this Python, which ends with the thread that started it.

    Args:
        rank: its number.
        environment: all of its variables; PYTHONPATH is added.
        pass_fds: further file descriptors that it inherits.
        stdout, stderr: as for Popen.
        by: what starts it, for messages.

    Attributes:
        connection: the pipe to the process; delivers one `Outcome`, or ends with the process.
    """

    def __init__(
        self,
        rank: int,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        stdout: int | None = None,
        stderr: int | None = None,
        by: str = "ring_plugins.run",
    ) -> None:
        self.rank = rank
        ours, theirs = Pipe()
        self.connection: Connection[Any, Any] = ours
        with theirs:
            self._process = subprocess.Popen(
                own_python(_START.format(fd=theirs.fileno(), parent=os.getpid(), rank=rank, by=by)),
                env={**environment, "PYTHONPATH": os.pathsep.join(search_path())},
                pass_fds=[*pass_fds, theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                # Ctrl-C reaches the process that called `run`, which ends the ranks. In its session each of them would
                # print its own KeyboardInterrupt.
                start_new_session=True,
            )

    def send_call(self, packed: bytes) -> None:
        """Send the call that the process is to run, as `outcomes.pack_call` made it."""
        with contextlib.suppress(OSError):  # the process has died already; `outcome` reports that
            self.connection.send(search_path_of_user())
            self.connection.send_bytes(packed)

    def outcome(self) -> Outcome:
        """Wait for the outcome of the call."""
        try:
            outcome = self.connection.recv()
            assert isinstance(outcome, Outcome)
            return outcome
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"its process ended with {ending(code)}"
            return Outcome(self.rank, failure=Failure(socket.gethostname(), how, is_loss=code < 0))

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process and whatever it started in its session."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()


def run_rank(fd: int, parent: int, rank: int, by: str) -> None:
    """Run in the process that `RankProcess` started: receive the call, run it, send its outcome, exit.

    Args:
        fd: file descriptor of the pipe to the parent.
        parent: process id of the parent.
        rank: number of this rank.
        by: as for `RankProcess`.
    """
    record.caller = by
    end_with_parent()
    if os.getppid() != parent:  # it ended before the line above took effect
        sys.exit(1)
    os.set_inheritable(fd, False)  # what the function starts could keep the pipe open
    connection: Connection[Any, Any] = Connection(fd)
    take_search_path(connection.recv())
    outcome = call(connection.recv_bytes(), rank)
    flush_output()
    connection.send(outcome)
    sys.exit(1 if outcome.failure is not None else 0)
