"""Simulate a training step of many ranks, event by event, on a cost model of their network.

Gradients become ready during backward, buckets are reduced one at a time in order, and the update waits for the last.

A network has a latency per hop and a rate per host (alpha and beta), as in Hockney's model (1994). The costs of a ring
and of a two-level all-reduce come from Thakur, Rabenseifner, Gropp, "Optimization of collective communication
operations in MPICH" (2005), and Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms" (2009).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.algorithms import cost, radices
from ring_plugins.core.gradients.fusion import BucketSizes, FusionPlan
from ring_plugins.planning.profile import Profile

#: Standard deviation of a rank's step times as a share of their mean; it makes the slowest of many ranks a straggler.
JITTER = 0.03


@dataclass(frozen=True)
class TransportModel:
    """How well a transport uses a network.

    Attributes:
        efficiency: share of a link's rate that an all-reduce reaches.
        alpha: seconds per hop between hosts.
        local_alpha: seconds per hop inside a host.
        local_gbytes: GB/s inside a host.
        two_level: whether an all-reduce first runs inside each host and then between hosts; otherwise one pipelined
            ring runs through all ranks.
    """

    efficiency: float
    alpha: float
    local_alpha: float
    local_gbytes: float
    two_level: bool


#: "rdma", "tcp" and "cpu" describe one ring over all ranks; each efficiency follows from one row of VGG-16 in Horovod's
#: published table. "ring" is ring_plugins between hosts, as measured on test hosts.
TRANSPORTS = {
    "rdma": TransportModel(efficiency=0.80, alpha=10e-6, local_alpha=3e-6, local_gbytes=10.0, two_level=False),
    "tcp": TransportModel(efficiency=0.52, alpha=30e-6, local_alpha=3e-6, local_gbytes=10.0, two_level=False),
    "cpu": TransportModel(efficiency=0.22, alpha=60e-6, local_alpha=5e-6, local_gbytes=5.0, two_level=False),
    "ring": TransportModel(efficiency=0.90, alpha=100e-6, local_alpha=10e-6, local_gbytes=4.0, two_level=True),
}
#: By codec, the share of the bytes that travel, and seconds to round a byte of gradients, on all its ways through a
#: host (benchmarks/compression.py at 10 Gbit/s). Rounding goes on while other pieces travel.
_COMPRESSION = {"bf16": (0.5, 0.85e-9), "int8": (17 / 64, 1.4e-9)}
#: Transports of GPUs, whose exchanges of weights go through host memory.
_OF_GPUS = ("rdma", "tcp")
#: Share of a step from which on options for slow networks are worth a line.
_SLOW = 0.05
#: Rates in Gbit/s of networks that have names.
PRESETS = {
    "gigabit": 1.0,
    "aws-p3": 10.0,
    "aws-p3dn": 100.0,
    "aws-p4d": 400.0,
    "ib-fdr": 54.3,
    "ib-edr": 100.0,
    "ib-hdr": 200.0,
    "ib-ndr": 400.0,
}


@dataclass(frozen=True)
class Network:
    """A network between hosts.

    Attributes:
        name: for display.
        gigabits: rate of a host's link in Gbit/s.
        transport: model of the transport that uses it.
        compression: what gradients are rounded to between hosts, "bf16" or "int8"; "bf16" in one ring over all ranks.
    """

    name: str
    gigabits: float
    transport: TransportModel
    compression: str | None = None

    def all_reduce(self, nbytes: int, ranks: int, per_host: int) -> float:
        """Seconds of one all-reduce while nothing else uses the network.

        Args:
            nbytes: bytes of the message.
            ranks: number of ranks.
            per_host: ranks on each host; the last host may have fewer.
        """
        t = self.transport
        here, hosts = min(ranks, per_host), -(-ranks // per_host)
        local_rate, rate = t.local_gbytes * 1e9, self.gigabits * 1e9 / 8 * t.efficiency
        inside = 2 * (here - 1) * t.local_alpha + 2 * (here - 1) / here * nbytes / local_rate
        if hosts == 1:
            return inside
        if t.two_level:
            share, rounding = _COMPRESSION[self.compression] if self.compression else (1.0, 0.0)
            between = max(2 * (hosts - 1) / hosts * nbytes * share / rate, nbytes * rounding)
            return inside + _hops(hosts) * t.alpha + between
        hops = hosts * t.alpha + (ranks - hosts) * t.local_alpha
        share = 2 * (ranks - 1) / ranks
        sent = nbytes * (_COMPRESSION[self.compression][0] if self.compression else 1.0)  # GPUs round fast
        return share * hops + share * sent / min(rate, local_rate)

    def inside(self, gbytes: float) -> Network:
        """The same network, with `gbytes` GB/s inside each host."""
        return replace(self, transport=replace(self.transport, local_gbytes=gbytes))

    def at(self, gigabits: float) -> Network:
        """The same network at another rate."""
        return replace(self, name=f"{gigabits:g} Gbit/s", gigabits=gigabits)


def parse(text: str, transport: str = "tcp") -> Network:
    """Parse the description of a network.

    Args:
        text: "25gbit", "800mbit"; "gigabit", "aws-p3", "aws-p3dn", "aws-p4d", "ib-fdr", "ib-edr", "ib-hdr" or "ib-ndr";
            or a file that `ring bench --json` or `ring doctor --json` wrote on at least two hosts.
        transport: "rdma", "tcp", "cpu" or "ring", as for `ring plan`; ignored for a measured file.

    Raises:
        ArgumentError: the text is none of these.
    """
    if transport not in TRANSPORTS:
        raise ArgumentError(f"transport={transport!r} is not one of {', '.join(TRANSPORTS)}.")
    rate = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([gm])(?:bit|bit/s|bps)?", text.strip().lower())
    if rate is not None and float(rate[1]) > 0:
        gigabits = float(rate[1]) * (1 if rate[2] == "g" else 1e-3)
        return Network(f"{gigabits:g} Gbit/s, {transport}", gigabits, TRANSPORTS[transport])
    if text in PRESETS:
        return Network(f"{text} ({PRESETS[text]:g} Gbit/s), {transport}", PRESETS[text], TRANSPORTS[transport])
    if Path(text).exists():
        return measured(Path(text))
    raise ArgumentError(
        f"network={text!r} is neither a rate such as 25gbit, nor one of {', '.join(PRESETS)}, nor a file written by "
        "ring bench --json."
    )


def measured(file: Path) -> Network:
    """Read the network that `ring bench --json` or `ring doctor --json` measured.

    Raises:
        ArgumentError: the file is not such a measurement, or was measured on one host.
    """
    try:
        record = json.loads(file.read_text())
        record = record.get("all_reduce", record)
        rows = [row for row in record["curve"] if row.get("backend", row.get("contestant")) in ("ring", "ring (GPU)")]
        ranks, hosts = int(record["ranks"]), int(record["nodes"])
        points = [(int(row["bytes"]), float(row["median"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"{file} was not written by ring bench --json ({type(error).__name__}: {error})."
        ) from error
    if hosts < 2 or len(points) < 2:
        raise ArgumentError(f"{file} was measured on one host; start ring bench on two hosts or more.")
    return fitted(f"measured on {hosts} hosts", points, ranks, hosts)


def fitted(name: str, points: Sequence[tuple[int, float]], ranks: int, hosts: int) -> Network:
    """Fit latency and rate to measured all-reduces, by least squares of relative errors.

    Args:
        name: for display.
        points: (bytes, seconds) of each all-reduce.
        ranks, hosts: numbers of ranks and hosts.
    """
    sizes, seconds = np.array(points, float).T
    # Small messages determine the cost of a hop, large ones the cost of a byte. Relative errors weigh both equally.
    design = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (fixed, each), *_ = np.linalg.lstsq(design, np.ones_like(sizes), rcond=None)
    if fixed <= 0:
        fixed = float(seconds.min()) / 2
    each = max(float(each), 1e-13)
    share = 2 * (hosts - 1) / hosts
    # The measurement includes the cost inside hosts, which cannot be separated from that of the network.
    inside = TransportModel(1.0, float(fixed) / _hops(hosts), 0.0, 1e6, True)
    return Network(name, share / each * 8e-9, inside)


def _hops(hosts: int) -> float:
    """How many hops between two hosts take as long as the latency of an all-reduce in groups of hosts."""
    return 2 * cost(radices(hosts)) / cost((2,))


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
        exposed_share: `exposed` as a share of the step.
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

    @property
    def exposed_share(self) -> float:
        return self.exposed / self.step


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


def remedies(
    profile: Profile, network: Network, ranks: int, per_host: int = 1, overlap: bool = True, every: int = 64
) -> dict[str, Prediction]:
    """What the options for slow networks would make of a step, by option; none on one host, and none over MPI.

    Args:
        every: steps from one exchange of local updates to the next.
        profile, network, ranks, per_host, overlap: as for `predict`.
    """
    is_on_gpus = network.transport in [TRANSPORTS[name] for name in _OF_GPUS]
    if ranks <= per_host or not (network.transport.two_level or is_on_gpus):
        return {}
    between = replace(network, transport=TRANSPORTS["ring"]) if is_on_gpus else network
    ways = {"bf16": network, "int8": between} if is_on_gpus else {None: network, "bf16": network, "int8": network}
    steps = {
        name: predict(profile, replace(way, compression=name), ranks, per_host, overlap=overlap)
        for name, way in ways.items()
    }
    best = min(steps, key=lambda name: steps[name].step)
    inside = predict(profile, network, per_host, per_host, overlap=overlap)
    exchange = between.all_reduce(profile.nbytes, ranks, per_host) / every
    waiting = steps[best].waiting
    local = replace(
        inside,
        ranks=ranks,
        step=inside.alone + inside.exposed + exchange + waiting,
        waiting=waiting,
        exposed=inside.exposed + exchange,
        communication=inside.communication + exchange,
    )
    return {f'compression="{best if is_on_gpus else "auto"}"': steps[best], f"sync_every={every}": local}


def advice(profile: Profile, network: Network, ranks: int, per_host: int = 1, overlap: bool = True) -> str:
    """A line that says what a step waits for, and what would make that less; "" where that is little.

    Args:
        profile, network, ranks, per_host, overlap: as for `predict`.
    """
    now, better = (
        predict(profile, network, ranks, per_host, overlap=overlap),
        remedies(profile, network, ranks, per_host, overlap),
    )
    if not better or now.exposed_share <= _SLOW:
        return ""
    shares = ", ".join(f"with {name} {one.exposed_share:.0%}" for name, one in better.items())
    return (
        f"This network moves {network.gigabits:.2g} Gbit/s: {profile.name} on {ranks:,} ranks would wait for it in "
        f"{now.exposed_share:.0%} of each step, {shares} (docs/slow_networks.md)."
    )


def counts(most: int) -> Sequence[int]:
    """Powers of two up to `most`, and `most` itself."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})
