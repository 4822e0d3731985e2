"""A training step of many ranks, event by event: gradients become ready, buckets leave in order, the update waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.gradients.fusion import BucketSizes, FusionPlan
from ring_plugins.planning.network import Network
from ring_plugins.planning.profile import Profile

#: Spread of a rank's step times around their mean: what makes the slowest of many ranks slower than one alone.
JITTER = 0.03


@dataclass(frozen=True)
class Prediction:
    """A step of `ranks` ranks.

    Attributes:
        ranks: how many.
        alone: seconds of a step of one rank by itself.
        step: seconds of a step of all.
        waiting: of these, for the slowest rank.
        exposed: of these, communication that nothing hides.
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
        """Throughput against as many ranks without communication; 1 is perfect."""
        return self.alone / self.step


def slowest_of(ranks: int, jitter: float = JITTER) -> float:
    """How much longer than the mean the slowest of `ranks` normally distributed times is expected to be, as a share.

    Blom's approximation of the largest order statistic (1958).
    """
    return 0.0 if ranks == 1 else jitter * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def messages(profile: Profile, sizes: BucketSizes) -> list[tuple[float, list[int]]]:
    """For each bucket in order when it is complete, in seconds of backward, and the bytes of its messages."""
    plan = FusionPlan(profile.entries, *sizes)
    found = []
    for bucket in plan.buckets:
        ready = max(profile.gradients[i].ready for i in bucket.entries)
        alone = [plan.entries[i].count * STORAGE[bucket.dtype].itemsize for i in bucket.direct]
        found.append((ready, [bucket.nbytes, *alone]))
    return found


def default_sizes(network: Network) -> BucketSizes:
    """Bucket sizes of the plane that a network belongs to: on GPUs every gradient lives in a bucket."""
    return BucketSizes() if network.transport.two_level else BucketSizes(crossover=None)


def predict(
    profile: Profile,
    network: Network,
    ranks: int,
    per_host: int = 1,
    sizes: BucketSizes | None = None,
    jitter: float = JITTER,
    overlap: bool = True,
) -> Prediction:
    """One step.

    Args:
        profile: of the model on one rank.
        network: between hosts.
        ranks: in all.
        per_host: ranks of a host.
        sizes: of buckets; the defaults of the network's plane where not given.
        jitter: spread of step times of a rank, as a share.
        overlap: whether communication gets on while backward computes, as on GPUs, or with a core to spare.
    """
    late = 1 + slowest_of(ranks, jitter)
    start = profile.forward * late
    end = start + profile.backward * late
    free, busy = start, 0.0
    if ranks > 1:
        for ready, parts in messages(profile, sizes or default_sizes(network)):
            took = sum(network.all_reduce(nbytes, ranks, per_host) for nbytes in parts)
            free = max(free, start + ready * late if overlap else end) + took
            busy += took
    step = max(end, free) + profile.update * late
    waiting = profile.step * (late - 1)
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
    """The rate in Gbit/s from which on an efficiency is reached; infinite where no rate is enough."""

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
