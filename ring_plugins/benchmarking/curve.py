"""All-reduce by size of message, in the terms of NVIDIA's nccl-tests.

algbw = bytes / time, what a program sees. busbw = algbw * 2 (n-1) / n for n ranks: what a ring moves over each link, so
that figures of different numbers of ranks can be compared with what the hardware can do
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ring_plugins as ring
from ring_plugins.benchmarking.backends import Contestant, close
from ring_plugins.benchmarking.timing import Times, interleaved
from ring_plugins.core.base.errors import ArgumentError

#: Up to this size one sample is the mean of several calls, as MPI's own benchmarks do.
_SMALL, _CALLS = 64 << 10, 20
_MOST = 1000


@dataclass(frozen=True)
class Curve:
    """Times of all contestants, by bytes.

    Attributes:
        ranks, nodes: of the job.
        times: bytes of a message to contestant to its times.
    """

    ranks: int
    nodes: int
    times: dict[int, dict[str, Times]]

    @property
    def contestants(self) -> list[str]:
        """Their names."""
        return list(next(iter(self.times.values()), {}))

    def algbw(self, nbytes: int, name: str, least: bool = False) -> float:
        """GB/s (10^9 bytes) that a program sees, at the median or the shortest time."""
        times = self.times[nbytes][name]
        return nbytes / (times.least if least else times.median) * 1e-9

    def busbw(self, nbytes: int, name: str, least: bool = False) -> float:
        """GB/s over each link of a ring."""
        return self.algbw(nbytes, name, least) * 2 * (self.ranks - 1) / self.ranks

    def record(self) -> dict[str, Any]:
        """As JSON can hold it; times in seconds, bandwidths in GB/s."""
        rows = [
            {
                "bytes": nbytes,
                "contestant": name,
                **asdict(times),
                "algbw": self.algbw(nbytes, name),
                "busbw": self.busbw(nbytes, name),
            }
            for nbytes, row in self.times.items()
            for name, times in row.items()
        ]
        return {"ranks": self.ranks, "nodes": self.nodes, "curve": rows}


def sizes(smallest: int, largest: int, factor: int = 4) -> list[int]:
    """Sizes from one to the other, by a factor; both ends are in.

    Raises:
        ArgumentError: no size fits between them.
    """
    if not 4 <= smallest <= largest or factor < 2:
        raise ArgumentError(
            f"smallest={smallest}, largest={largest}, factor={factor}: sizes go from 4 bytes or more up to the "
            "largest, by a factor of 2 or more."
        )
    found, size = [], smallest // 4 * 4
    while size < largest:
        found.append(size)
        size *= factor
    return [*found, largest // 4 * 4]


def all_reduce_curve(
    contestants: Mapping[str, Contestant],
    nbytes: Sequence[int],
    seconds: float,
    say: Callable[[int, dict[str, Times]], None] = lambda size, times: None,
) -> Curve:
    """Measure float32 sums or averages of these sizes; collective.

    Args:
        contestants: what to measure, by name, taking turns.
        nbytes: of the messages, multiples of 4.
        seconds: to spend on each size, about.
        say: told of every size when it is done.

    Returns:
        The same on all ranks.
    """
    found: dict[int, dict[str, Times]] = {}
    for size in nbytes:
        made = {name: make(size) for name, make in contestants.items()}
        calls = _CALLS if size <= _SMALL else 1
        probe = interleaved(made, 3, calls, warm_up=1)
        repetition = calls * sum(times.median for times in probe.values())
        found[size] = interleaved(made, int(min(_MOST, max(5, seconds / repetition))), calls, warm_up=1)
        for call in made.values():
            close(call)
        say(size, found[size])
    return Curve(ring.size(), ring.num_nodes(), found)
