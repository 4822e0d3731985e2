"""`ring_plugins.run`: a function on several ranks of this host, from a notebook, a test or a script."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, TypeVar

from ring_plugins.core import world
from ring_plugins.core.errors import ArgumentError, LaunchError, TimeoutExceeded
from ring_plugins.core.launch import detect
from ring_plugins.core.launch.meeting import Meeting, invitation
from ring_plugins.core.process import cores
from ring_plugins.core.shared_memory import Segment
from ring_plugins.launching.exports import threads_per_rank
from ring_plugins.launching.outcomes import Outcome, pack, results_of
from ring_plugins.launching.output import Relay
from ring_plugins.launching.process import RankProcess

T = TypeVar("T")

#: Seconds in which the others may report, or end, once a rank has failed or all have reported.
_GRACE = 7.0


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
    available = cores()
    ranks = available if ranks is None else ranks
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
    environment = {"OMP_NUM_THREADS": str(threads_per_rank(available, ranks)), **os.environ, **(env or {})}
    with Relay(tag_output, always=sys.stdout is not sys.__stdout__) as relay, _Ranks(ranks, environment, relay) as job:
        relay.start()
        return results_of(job.outcomes(packed, timeout))


class _Ranks:
    """The processes of one call. As a context it leaves none of them behind."""

    def __init__(self, ranks: int, environment: Mapping[str, str], relay: Relay) -> None:
        segment = Segment.create(Meeting.nbytes(ranks))
        self._processes: list[RankProcess] = []
        try:
            for rank in range(ranks):
                invited = {**environment, **invitation(segment, rank, ranks, os.getpid())}
                self._processes.append(RankProcess(rank, invited, [segment.fd], *relay.ends(rank)))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> _Ranks:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end(patience=_GRACE if kind is None else 0.0)

    def outcomes(self, packed: bytes, timeout: float | None) -> list[Outcome]:
        """Hand out the work, and gather how it ended on each rank, until all have, or one failed and its time is up."""
        for process in self._processes:
            process.work(packed)
        found: list[Outcome] = []
        end = time.monotonic() + timeout if timeout is not None else float("inf")
        give_up = float("inf")
        waiting = {id(process.connection): process for process in self._processes}
        while waiting and time.monotonic() < give_up:
            if time.monotonic() > end:
                late = sorted(process.rank for process in waiting.values())
                raise TimeoutExceeded(
                    f"timeout={timeout:g}: ranks {late} of {len(self._processes)} had not finished, and were ended."
                )
            for ready in wait([process.connection for process in waiting.values()], 0.1):
                found.append(waiting.pop(id(ready)).outcome())
                if found[-1].failure is not None:
                    give_up = min(give_up, time.monotonic() + _GRACE)
        return found

    def _end(self, patience: float = 0.0) -> None:
        end = time.monotonic() + patience
        while time.monotonic() < end and not all(process.has_ended() for process in self._processes):
            time.sleep(0.005)
        for process in self._processes:
            process.end()
