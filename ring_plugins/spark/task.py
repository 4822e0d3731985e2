"""What runs in each Spark task: one rank, in a process of its own, with an eye on the driver."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from ring_plugins.core.linux.interfaces import address_towards, free_port
from ring_plugins.launcher.control import Line
from ring_plugins.launcher.local_ranks import RankProcess
from ring_plugins.launcher.rank_assignment import seats


@dataclass(frozen=True)
class Task:
    """A barrier task, callable as `mapPartitions` wants it.

    Attributes:
        driver, port, key: where the driver listens.
        variables: to set for the rank.
    """

    driver: str
    port: int
    key: bytes = field(repr=False)
    variables: dict[str, str]

    def __call__(self, _: Iterable[int]) -> Iterator[int]:
        """Be a rank until it has ended, or the driver is gone."""
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        mine = json.dumps([socket.gethostname(), address_towards(self.driver) or socket.gethostname(), free_port()])
        told = [json.loads(text) for text in context.allGather(mine)]
        placed = seats([host for host, _, _ in told])
        seat = placed[context.partitionId()]
        first = next(other for other, place in zip(told, placed, strict=True) if place.rank == 0)
        line = Line(self.driver, self.port, self.key, seat.rank)
        process = RankProcess(seat.rank, {**os.environ, **seat.environment(first[1], first[2]), **self.variables})
        try:
            process.send_call(line.work())
            ready = wait([process.connection, line.connection])
            if process.connection in ready:
                line.report(process.outcome())
                # The process may have things to finish; the driver ends the line when it has heard from all.
                while not process.has_ended() and not wait([line.connection], 0.05):
                    pass
        finally:
            process.kill()
        return iter(())
