"""Simulate a training step of many ranks, event by event.

Gradients become ready during backward, buckets are reduced one at a time in order, and the update waits for the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.gradients.fusion import BucketSizes, FusionPlan
from ring_plugins.planning.network import Network
from ring_plugins.planning.profile import Profile

#: Standard deviation of a rank's step times as a share of their mean; it makes the slowest of many ranks a straggler.
JITTER = 0.03


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a job.

    Attributes:
        ranks: number of ranks.
        alone: seconds of a step of one rank without communication.
        step: seconds of a step of all ranks.
        waiting: seconds of that step spent waiting for the slowest rank (the straggler).
        exposed: seconds of that step spent in communication that backward does not hide.
        communication: seconds of communication in all, hidden or not.
    """

    ranks: int
    alone: float
    step: float
    waiting: float
    exposed: float
    communication: float

    @property
    def efficiency(self) -> float:
        """Throughput relative to that of the same number of ranks without communication."""
        return self.alone / self.step


def slowest_of(ranks: int, jitter: float = JITTER) -> float:
    """The expected excess of the slowest of `ranks` normally distributed times over their mean, as a share of the mean.

    Blom's approximation of the largest order statistic (1958).
    """
    return 0.0 if ranks == 1 else jitter * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def messages(profile: Profile, sizes: BucketSizes) -> list[tuple[float, list[int]]]:
    """For each bucket in order: seconds of backward until it is complete, and the bytes of its messages."""
    plan = FusionPlan(profile.entries, sizes)
    found = []
    for bucket in plan.buckets:
        ready = max(profile.gradients[i].ready for i in bucket.entries)
        direct = [plan.entries[i].count * STORAGE[bucket.dtype].itemsize for i in bucket.direct]
        found.append((ready, [bucket.nbytes, *direct]))
    return found


def default_sizes(network: Network) -> BucketSizes:
    """Bucket sizes of the communicator that uses a network; on GPUs every gradient is in a bucket."""
    return BucketSizes() if network.transport.two_level else BucketSizes(direct_bytes=None)


def predict(
    profile: Profile,
    network: Network,
    ranks: int,
    per_host: int = 1,
    sizes: BucketSizes | None = None,
    jitter: float = JITTER,
    overlap: bool = True,
) -> Prediction:
    """Predict one step.

    Args:
        profile: profile of the model on one rank.
        network: network between hosts.
        ranks: number of ranks in all.
        per_host: ranks per host.
        sizes: bucket sizes; by default those of the network's communicator.
        jitter: standard deviation of a rank's step times, as a share of their mean.
        overlap: whether communication proceeds while backward computes, as on GPUs or with a spare core.
    """
    straggler = 1 + slowest_of(ranks, jitter)
    start = profile.forward * straggler
    end = start + profile.backward * straggler
    free, busy = start, 0.0
    if ranks > 1:
        for ready, parts in messages(profile, sizes or default_sizes(network)):
            took = sum(network.all_reduce(nbytes, ranks, per_host) for nbytes in parts)
            free = max(free, start + ready * straggler if overlap else end) + took
            busy += took
    step = max(end, free) + profile.update * straggler
    waiting = profile.step * (straggler - 1)
    return Prediction(ranks, profile.step, step, waiting, step - profile.step - waiting, busy)


def needed_gigabits(
    profile: Profile,
    network: Network,
    ranks: int,
    per_host: int = 1,
    efficiency: float = 0.9,
    sizes: BucketSizes | None = None,
    overlap: bool = True,
) -> float:
    """The lowest rate in Gbit/s that reaches an efficiency; infinite if no rate is enough.

    Args:
        efficiency: throughput relative to that without communication, from 0 to 1.
        profile, network, ranks, per_host, sizes, overlap: as for `predict`; of the network, only the transport counts.
    """

    def enough(gigabits: float) -> bool:
        return predict(profile, network.at(gigabits), ranks, per_host, sizes, overlap=overlap).efficiency >= efficiency

    low, high = 1e-3, 1e5
    if not enough(high):
        return math.inf
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def counts(most: int) -> Sequence[int]:
    """Powers of two up to `most`, and `most` itself."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})
