"""`ring_plugins.run`: a function on several ranks of this host, from a notebook, a test or a script."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any, TypeVar

from ring_plugins.core import world
from ring_plugins.core.errors import ArgumentError, LaunchError, TimeoutExceeded
from ring_plugins.core.launch import detect
from ring_plugins.core.launch.meeting import Meeting, ending, invitation
from ring_plugins.core.shared_memory import Segment
from ring_plugins.launching.exports import threads_per_rank
from ring_plugins.launching.outcomes import Failure, Outcome, pack, results_of
from ring_plugins.launching.output import Relay

T = TypeVar("T")

#: Seconds in which the others may report, or end, once a rank has failed or all have reported.
_GRACE = 7.0
_START = "from ring_plugins.launching.worker import main; main({fd}, {parent}, {rank})"


def run(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    ranks: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    tag_output: bool = False,
    timeout: float | None = None,
) -> list[T]:
    """Call `function(*args, **kwargs)` on several ranks of this host, and return what it returned on each.

    Every rank is a fresh process of this Python, in which `ring_plugins.init()` finds the others; what this process
    has imported or initialised (torch, TensorFlow, CUDA) is not shared and does no harm. All ranks end when one
    fails, when this call is interrupted, and when this process ends, however it does.

    Args:
        function: also one from a notebook, a script or a closure, where cloudpickle is installed. Data that it
            refers to travels with it.
        args, kwargs: for the function, the same on every rank.
        ranks: how many; by default one for every core that this process may use.
        env: variables to set for the ranks. OMP_NUM_THREADS is their share of the cores, unless it is set.
        tag_output: put `[rank] ` in front of every line that a rank prints.
        timeout: seconds for everything, without limit by default.

    Returns:
        The results in rank order.

    Raises:
        RankFailed: the function raised on a rank, or its process died; the exception is the `__cause__`.
        ArgumentError: a function, argument or number that cannot be used.
        TimeoutExceeded: `timeout` passed; all ranks have been ended.
        LaunchError: this process is itself a rank of a job.
    """
    cores = len(os.sched_getaffinity(0))
    ranks = cores if ranks is None else ranks
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"ranks={ranks!r} is not a positive number of processes.")
    if timeout is not None and timeout <= 0:
        raise ArgumentError(f"timeout={timeout!r} is not a positive number of seconds.")
    if detect().kind != "alone" or (world.is_initialised() and world.current().place.size > 1):
        raise LaunchError(
            f"this process is itself a rank, and ring_plugins.run() would start {ranks} more on each; start the script "
            "alone, or call the function itself after ring_plugins.init()."
        )
    name = getattr(function, "__qualname__", function)
    packed = pack(f"function={name!r} with its arguments", (function, tuple(args), {**(kwargs or {})}))
    environment = {"OMP_NUM_THREADS": str(threads_per_rank(cores, ranks)), **os.environ, **(env or {})}
    environment["PYTHONPATH"] = os.pathsep.join(_search_path())
    with Relay(tag_output, always=sys.stdout is not sys.__stdout__) as relay, _Ranks(ranks, environment, relay) as job:
        relay.start()
        return results_of(job.outcomes(packed, timeout))


class _Ranks:
    """The processes of one call. As a context it leaves none of them behind."""

    def __init__(self, ranks: int, environment: Mapping[str, str], relay: Relay) -> None:
        self._segment = Segment.create(Meeting.nbytes(ranks))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection[Any, Any]] = []
        try:
            for rank in range(ranks):
                self._start(rank, ranks, environment, relay)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> _Ranks:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end(patience=_GRACE if kind is None else 0.0)

    def _start(self, rank: int, ranks: int, environment: Mapping[str, str], relay: Relay) -> None:
        ours, theirs = Pipe()
        self._connections.append(ours)
        out, err = relay.ends(rank)
        start = _START.format(fd=theirs.fileno(), parent=os.getpid(), rank=rank)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", start],
                env={**environment, **invitation(self._segment, rank, ranks, os.getpid())},
                pass_fds=[self._segment.fd, theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                # Ctrl-C interrupts this process, which ends the ranks: they need not all say that they were.
                start_new_session=True,
            )
        self._processes.append(process)

    def outcomes(self, packed: bytes, timeout: float | None) -> list[Outcome]:
        """Hand out the work, and gather how it ended on each rank, until all have, or one failed and its time is up."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has died already, which is found below
                connection.send(_search_path())
                connection.send_bytes(packed)
        found: list[Outcome] = []
        end = time.monotonic() + timeout if timeout is not None else float("inf")
        give_up = float("inf")
        waiting = {id(connection): rank for rank, connection in enumerate(self._connections)}
        while waiting and time.monotonic() < give_up:
            if time.monotonic() > end:
                raise TimeoutExceeded(
                    f"timeout={timeout:g}: ranks {sorted(waiting.values())} of {len(self._processes)} had not "
                    "finished, and were ended."
                )
            for ready in wait([self._connections[rank] for rank in waiting.values()], 0.1):
                found.append(self._outcome(waiting.pop(id(ready))))
                if found[-1].failure is not None:
                    give_up = min(give_up, time.monotonic() + _GRACE)
        return found

    def _outcome(self, rank: int) -> Outcome:
        try:
            outcome = self._connections[rank].recv()
            assert isinstance(outcome, Outcome)
            return outcome
        except (EOFError, OSError):
            code = self._processes[rank].wait()
            return Outcome(rank, failure=Failure(socket.gethostname(), f"its process ended with {ending(code)}"))

    def _end(self, patience: float = 0.0) -> None:
        end = time.monotonic() + patience
        while time.monotonic() < end and any(process.poll() is None for process in self._processes):
            time.sleep(0.005)
        for process in self._processes:
            with contextlib.suppress(OSError):  # the group, for what the rank started itself
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()


def _search_path() -> list[str]:
    """Where this process finds modules, in words that hold elsewhere."""
    return [path or os.getcwd() for path in sys.path]
