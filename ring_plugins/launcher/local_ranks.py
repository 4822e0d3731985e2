"""Ranks of a function on this host, which meet in shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from types import TracebackType

from ring_plugins.core.base.errors import TimeoutExceeded
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment
from ring_plugins.launcher.outcomes import Outcome
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.process import RankProcess

#: Seconds in which the others may report, or end, once a rank has failed or all have reported.
_GRACE = 7.0


class LocalRanks:
    """The processes of one call. As a context it leaves none of them behind.

    Args:
        ranks: how many.
        environment: of all of them, but for who is who.
        relay: takes what they print.
    """

    def __init__(self, ranks: int, environment: Mapping[str, str], relay: Relay) -> None:
        segment = Segment.create(SharedMemoryRendezvous.nbytes(ranks))
        self._processes: list[RankProcess] = []
        try:
            for rank in range(ranks):
                invited = {**environment, **child_environment(segment, rank, ranks, os.getpid())}
                self._processes.append(RankProcess(rank, invited, [segment.fd], *relay.ends(rank)))
            relay.start()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> LocalRanks:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end(patience=_GRACE if kind is None else 0.0)

    def outcomes(self, packed: bytes, timeout: float | None) -> list[Outcome]:
        """Hand out the work, and gather how each ended: of all, or until one failed and the others' time is up.

        Args:
            packed: what `outcomes.pack` made of `(function, args, kwargs)`.
            timeout: seconds for everything, or None.

        Raises:
            TimeoutExceeded: the time has passed.
        """
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
