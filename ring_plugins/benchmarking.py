"""Measurements of collectives that `ring bench`, `ring doctor` and benchmarks/ share.

Backends are ring_plugins and the libraries with which it is compared. Times of all-reduce by message size are in the
terms of NVIDIA's nccl-tests: algbw = bytes / time is the bandwidth that a program sees. busbw = algbw * 2 (n-1) / n for
n ranks is the rate of a ring over each link, which can be compared with the rate of the hardware for any number of
ranks (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

Timing is interleaved: every repetition runs all variants, so that noise of the machine affects all of them equally.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.linux.interfaces import interfaces
from ring_plugins.core.net.network_choice import choose, own_interfaces
from ring_plugins.core.world import current

#: Up to this size one sample is the mean of several calls, as in MPI's own benchmarks.
_SMALL, _CALLS = 64 << 10, 20
_MOST_REPETITIONS = 1000
#: Takes the bytes of a message. Returns a function that all-reduces one in place on all ranks, and blocks until done.
Backend = Callable[[int], Callable[[], object]]


# Backends -----------------------------------------------------------------------------------------


def ordinary(nbytes: int) -> Callable[[], object]:
    """ring_plugins, in memory that numpy allocated."""
    array = np.ones(nbytes // 4, np.float32)
    return lambda: ring.all_reduce(array, out=array)


def bucket(nbytes: int) -> Callable[[], object]:
    """ring_plugins, in memory that the communicator allocated, as for the buckets of small gradients."""
    communicator = current().communicator
    buffer = communicator.allocate(nbytes)
    shared = buffer.array.view(np.float32)
    shared[:] = 1
    return _Releasing(lambda: ring.all_reduce(shared, out=shared), lambda: communicator.release(buffer))


def plain_copy(nbytes: int) -> Callable[[], object]:
    """`numpy.copyto` of the same bytes, a lower bound for an all-reduce of ordinary memory."""
    source, target = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
    return lambda: np.copyto(target, source)


def mpi(nbytes: int) -> Callable[[], object]:
    """`MPI_Allreduce` of the MPI that mpi4py uses."""
    from mpi4py import MPI

    array = np.ones(nbytes // 4, np.float32)
    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array, MPI.SUM)


def gloo(nbytes: int) -> Callable[[], object]:
    """torch.distributed's gloo."""
    import torch
    import torch.distributed as dist

    start_gloo()
    tensor = torch.ones(nbytes // 4)
    return lambda: dist.all_reduce(tensor)


class _Releasing:
    """A reduction whose memory `close` releases. Collective."""

    def __init__(self, reduce: Callable[[], object], release: Callable[[], None]) -> None:
        self._reduce, self.close = reduce, release

    def __call__(self) -> object:
        return self._reduce()


HOST: dict[str, Backend] = {
    "ring": ordinary,
    "ring bucket": bucket,
    "plain copy": plain_copy,
    "MPI": mpi,
    "gloo": gloo,
}


def check_names(names: Iterable[str]) -> None:
    """Check names of host backends before starting ranks.

    Raises:
        ArgumentError: a name is unknown.
    """
    for name in names:
        if name not in HOST:
            raise ArgumentError(f"{name!r} is not one of {', '.join(HOST)}.")


def host_backends(names: Iterable[str] | None = None) -> dict[str, Backend]:
    """Backends that reduce host memory and can run in this job.

    Args:
        names: names of the wanted backends; by default all that are available.

    Raises:
        ArgumentError: a name is unknown, or its backend cannot run here.
    """
    available = [
        name
        for name in HOST
        if (name != "MPI" or current().launcher.uses_mpi)
        and (name != "gloo" or importlib.util.find_spec("torch") is not None)
    ]
    wanted = available if names is None else list(names)
    check_names(wanted)
    for name in wanted:
        if name not in available:
            raise ArgumentError(f"{name} cannot be measured here: MPI needs mpirun, gloo needs torch.")
    return {name: HOST[name] for name in wanted}


_groups: dict[str, Any] = {}


def _on_gpu(backend: str, nbytes: int) -> Callable[[], object]:
    """torch.distributed in GPU memory, with a backend of its own or ours."""
    import torch
    import torch.distributed as dist

    start_gloo()
    torch.cuda.set_device(ring.local_rank() % torch.cuda.device_count())
    if backend not in _groups:
        _groups[backend] = dist.new_group(backend=backend)
    tensor = torch.ones(nbytes // 4, device="cuda")

    def reduce() -> None:
        dist.all_reduce(tensor, group=_groups[backend])
        torch.cuda.synchronize()

    return reduce


DEVICE: dict[str, Backend] = {"ring (GPU)": partial(_on_gpu, "ring"), "NCCL (torch)": partial(_on_gpu, "nccl")}


def device_backends() -> dict[str, Backend]:
    """Backends that reduce GPU memory; none if torch sees no GPU."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    return DEVICE if torch.cuda.is_available() else {}


def start_gloo() -> None:
    """Make gloo torch.distributed's default group of all ranks of this job, unless it has one. Collective."""
    import torch.distributed as dist

    from ring_plugins.torch.rendezvous import store_from_world

    if dist.is_initialized():
        return
    address = choose(ring.all_gather_object(own_interfaces(ring.rank()))).addresses[ring.rank()]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", next(one.name for one in interfaces() if one.address == address))
    store, rank, size = store_from_world()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


# Times --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Seconds of one variant; each sample is the time of the slowest rank.

    Attributes:
        median: median of all samples.
        low, high: quartiles.
        least: shortest sample.
    """

    median: float
    low: float
    high: float
    least: float


def interleaved(
    variants: Mapping[str, Callable[[], object]], repetitions: int, calls: int = 1, warm_up: int = 2
) -> dict[str, Times]:
    """Time all variants in turn, on all ranks. Collective.

    A collective takes as long as its slowest rank, so the ranks' times are combined by MAX for each repetition. Every
    other repetition runs the variants in reverse order.

    Args:
        variants: name -> function to time.
        repetitions: samples of each variant.
        calls: calls of a variant per sample, which is their mean time.
        warm_up: repetitions before the first sample.
    """
    names = list(variants)
    seconds = np.zeros((repetitions, len(names)))
    gc.collect()
    gc.disable()
    try:
        for repetition in range(-warm_up, repetitions):
            order = range(len(names)) if repetition % 2 else reversed(range(len(names)))
            for i in order:
                ring.barrier()
                started = time.perf_counter()
                variant = variants[names[i]]
                for _ in range(calls):
                    variant()
                elapsed = (time.perf_counter() - started) / calls
                if repetition >= 0:
                    seconds[repetition, i] = elapsed
    finally:
        gc.enable()
    seconds = ring.all_reduce(seconds, ring.MAX)
    quantiles = np.percentile(seconds, [50, 25, 75, 0], axis=0)
    return {name: Times(*map(float, quantiles[:, i])) for i, name in enumerate(names)}


@dataclass(frozen=True)
class Curve:
    """Times of all backends by message size.

    Attributes:
        ranks, nodes: numbers of ranks and hosts of the job.
        times: bytes of a message -> backend -> times.
    """

    ranks: int
    nodes: int
    times: dict[int, dict[str, Times]]

    @property
    def job(self) -> str:
        """ "2 ranks on 1 host"."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)} on {self.nodes} host{'s' * (self.nodes > 1)}"

    @property
    def backends(self) -> list[str]:
        """Names of the backends."""
        return list(next(iter(self.times.values()), {}))

    def algbw(self, nbytes: int, name: str, least: bool = False) -> float:
        """GB/s (10^9 bytes) that a program sees, at the median or the shortest time."""
        times = self.times[nbytes][name]
        return nbytes / (times.least if least else times.median) * 1e-9

    def busbw(self, nbytes: int, name: str, least: bool = False) -> float:
        """GB/s over each link of a ring."""
        return self.algbw(nbytes, name, least) * 2 * (self.ranks - 1) / self.ranks

    def record(self) -> dict[str, Any]:
        """The curve as JSON values; times in seconds, bandwidths in GB/s."""
        rows = [
            {
                "bytes": nbytes,
                "backend": name,
                **asdict(times),
                "algbw": self.algbw(nbytes, name),
                "busbw": self.busbw(nbytes, name),
            }
            for nbytes, row in self.times.items()
            for name, times in row.items()
        ]
        return {"ranks": self.ranks, "nodes": self.nodes, "curve": rows}


def sizes(smallest: int, largest: int, factor: int = 4) -> list[int]:
    """Sizes from the smallest to the largest, both included, each `factor` times the previous one.

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
    backends: Mapping[str, Backend],
    nbytes: Sequence[int],
    seconds: float,
    report: Callable[[int, dict[str, Times]], None] = lambda size, times: None,
) -> Curve:
    """Measure float32 all-reduces of several sizes. Collective.

    Args:
        backends: name -> backend; they take turns.
        nbytes: message sizes, multiples of 4.
        seconds: approximate time to spend on each size.
        report: called after each size with its times.

    Returns:
        The same curve on all ranks.
    """
    found: dict[int, dict[str, Times]] = {}
    for size in nbytes:
        reductions = {name: make(size) for name, make in backends.items()}
        calls = _CALLS if size <= _SMALL else 1
        probe = interleaved(reductions, 3, calls, warm_up=1)
        repetition = calls * sum(times.median for times in probe.values())
        repetitions = int(min(_MOST_REPETITIONS, max(5, seconds / repetition)))
        found[size] = interleaved(reductions, repetitions, calls, warm_up=1)
        for reduction in reductions.values():
            if isinstance(reduction, _Releasing):
                reduction.close()
        report(size, found[size])
    return Curve(ring.size(), ring.num_nodes(), found)
