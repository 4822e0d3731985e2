"""Measure what it costs that the ranks of a host compute with more threads than it has cores.

All ranks multiply matrices at once, as in training: in turns with their number of threads and with their share of the
cores. numpy's library stands for the frameworks', which take long to load; they suffer more, having more parallel
regions in a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import ring_plugins as ring
from ring_plugins.core.linux import thread_count
from ring_plugins.core.world import current
from ring_plugins.doctor.facts import Facts

_ROUNDS, _SECONDS, _WIDTH = 3, 0.15, 384


class ThreadCost(NamedTuple):
    """Time of a matrix product while all ranks of a host compute.

    Attributes:
        threads, share: number of threads of a rank, and its share of the cores.
        milliseconds, milliseconds_with_share: with either.
    """

    threads: int
    share: int
    milliseconds: float
    milliseconds_with_share: float

    def __str__(self) -> str:
        ratio = self.milliseconds / self.milliseconds_with_share
        return (
            f"numpy's matrix products on all ranks at once take {self.milliseconds:.2f} ms with {self.threads} threads "
            f"each, {self.milliseconds_with_share:.2f} ms with {self.share}: {ratio:.1f} times as long"
        )


def measure_thread_cost(facts: Sequence[Facts]) -> dict[str, ThreadCost]:
    """What its threads cost each host that has fewer cores, by `Facts.kernel`. Collective; takes about a second."""
    shares = {kernel: cores_of(here) // len(here) for kernel, here in by_kernel(facts).items()}
    too_many = [kernel for kernel, here in by_kernel(facts).items() if has_too_many_threads(here)]
    if not too_many:
        return {}
    own = facts[current().topology.rank].kernel
    share = max(1, shares[own])
    times: list[list[float]] = [[], []]
    threads = 0
    for _ in range(_ROUNDS):
        for number, found in zip((None, share), times, strict=True):
            with thread_count.linear_algebra_threads(number) as used:
                threads = max(threads, used)
                ring.barrier()
                found.append(_product())
    medians = [statistics.median(found) * 1e3 for found in times]
    everyone = ring.all_gather_object([own, threads, share, *medians])
    slowest = sorted(everyone, key=lambda item: item[3])
    return {kernel: ThreadCost(*item) for kernel, *item in slowest if kernel in too_many}


def by_kernel(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    """The ranks that share cores."""
    found: dict[str, list[Facts]] = {}
    for fact in facts:
        found.setdefault(fact.kernel, []).append(fact)
    return found


def cores_of(here: Sequence[Facts]) -> int:
    """How many cores the ranks of a host may use together."""
    return len({core for fact in here for core in fact.cores})


def has_too_many_threads(here: Sequence[Facts]) -> bool:
    """Whether the ranks of a host, of which there is a core for each, start more threads than cores."""
    return len(here) <= cores_of(here) < sum(fact.threads for fact in here)


def _product() -> float:
    """Seconds of a matrix product, the median over a while."""
    matrix = np.ones((_WIDTH, _WIDTH), np.float32)
    seconds: list[float] = []
    end = time.perf_counter() + _SECONDS
    while not seconds or time.perf_counter() < end:
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
