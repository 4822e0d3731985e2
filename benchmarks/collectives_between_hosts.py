"""Broadcast, all-gather, reduce-scatter, all-to-all and barrier between hosts: in two levels, flat, and by MPI.

    python benchmarks/collectives_between_hosts.py                          # on two test hosts here, as root
    python benchmarks/collectives_between_hosts.py --hosts 4 --rate 1gbit
    mpirun -n 4 --hostfile hosts python benchmarks/collectives_between_hosts.py --here  # on real hosts

"flat" lets all ranks exchange with all others over the same sockets, as before the collectives had two levels. The size
is that of the whole array: what is broadcast, what all ranks gather together, what each rank reduces or sends.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measure import init_under_mpirun, machine, on_test_hosts, used_by_others

import ring_plugins as ring
from ring_plugins.benchmarking import interleaved
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.net_group import NetworkGroup
from ring_plugins.core.net import mpi
from ring_plugins.core.world import current

SIZES = [4 << 10, 1 << 20, 25 << 20]


def flat() -> HostCommunicator:
    """A communicator whose ranks all exchange with each other."""
    communicator = current().new_communicator("flat")
    assert isinstance(communicator, HostCommunicator)
    transport, wait = current()._rendezvous.transport, communicator._executor.wait
    assert transport is not None
    group = NetworkGroup(transport, communicator.ranks, communicator.rank, 1_000_001, wait, "flat")
    group.connect()
    communicator.groups.bytes = group
    return communicator


def calls(communicator: HostCommunicator, nbytes: int) -> dict[str, Callable[[], object]]:
    """The collectives of one communicator, by name."""
    count, size = nbytes // 4, communicator.size
    each = [count // size] * size
    whole, part, other = (np.ones(n, np.float32) for n in (count, count // size, count))
    big, small, out = (HostMemory(array, "float32") for array in (whole, part, other))
    return {
        "broadcast": lambda: communicator.broadcast(big, 0),
        "all-gather": lambda: communicator.all_gather(small, out, each),
        "reduce-scatter": lambda: communicator.reduce_scatter(big, small, each, Op.SUM),
        "all-to-all": lambda: communicator.all_to_all(big, each, out, each),
        "barrier": communicator.barrier,
    }


def mpi_calls(nbytes: int) -> dict[str, Callable[[], object]]:
    """The same by MPI."""
    module = mpi.load()
    world, count = module.COMM_WORLD, nbytes // 4
    whole, part, other = (np.ones(n, np.float32) for n in (count, count // world.size, count))
    return {
        "broadcast": lambda: world.Bcast(whole, 0),
        "all-gather": lambda: world.Allgather(part, other),
        "reduce-scatter": lambda: world.Reduce_scatter_block(whole, part, module.SUM),
        "all-to-all": lambda: world.Alltoall(whole, other),
        "barrier": world.Barrier,
    }


def worker(options: argparse.Namespace) -> None:
    """Measure on this rank, which mpirun has started so that MPI can be measured too; ring_plugins uses sockets."""
    init_under_mpirun(options.address)
    two_level, flat_one = current().communicator, flat()
    assert isinstance(two_level, HostCommunicator)
    lines = [
        "|  | size | two-level, ms: best | median | flat / two-level: best | median | MPI / two-level: best | median |"
    ]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for nbytes in SIZES:
        variants = {"two": calls(two_level, nbytes), "flat": calls(flat_one, nbytes), "MPI": mpi_calls(nbytes)}
        for name in variants["two"]:
            if name == "barrier" and nbytes > SIZES[0]:
                continue
            made = {variant: of_variant[name] for variant, of_variant in variants.items()}
            probe = interleaved(made, 2, 1)
            repetitions = int(min(200, max(7, options.seconds / sum(times.median for times in probe.values()))))
            times = interleaved(made, repetitions, 1)
            two, others = times["two"], [times["flat"], times["MPI"]]
            ratios = [f"{other.least / two.least:.2f} | {other.median / two.median:.2f}" for other in others]
            text = f"{nbytes >> 10:,} KiB" if name != "barrier" else ""
            lines.append(f"| {name} | {text} | {two.least * 1e3:.2f} | {two.median * 1e3:.2f} | {' | '.join(ratios)} |")
    shared = used_by_others(float(ring.all_reduce(time.process_time(), ring.SUM)))
    if ring.rank() == 0:
        text = "\n".join([*lines, "", f"({machine(shared=shared)})"])
        print(text, flush=True)
        if options.out:
            Path(options.out).write_text(text)
    ring.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="number of test hosts")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each test host")
    parser.add_argument("--rate", default="10gbit", help="rate of each link; none for no limit")
    parser.add_argument("--seconds", type=float, default=3.0, help="approximate time to spend on each row")
    parser.add_argument("--here", action="store_true", help="measure among the ranks that mpirun started")
    parser.add_argument("--address", help="address of rank 0's host, with --here")
    parser.add_argument("--out", help="file for the result, with --here")
    options = parser.parse_args()
    if options.here:
        worker(options)
        return
    rate = None if options.rate == "none" else options.rate
    print(on_test_hosts(__file__, options.hosts, rate, ["--seconds", str(options.seconds)], options.ranks))


if __name__ == "__main__":
    main()
