"""All-reduce of float32 between hosts, beside flat MPI, torch's gloo, bare sockets and the limit of the wire.

    python benchmarks/between_hosts.py                          # the whole table, on test hosts here, as root
    python benchmarks/between_hosts.py --hosts 2 --rate 10gbit  # one network, printed only
    mpirun -n 4 --hostfile hosts python benchmarks/between_hosts.py --here  # on real hosts

Test hosts are network namespaces with shaped links (tests/hosts), two ranks each. They share this machine's cores for
all ranks' arithmetic and for the kernel's packets, so from about 10 Gbit/s on the cores are the bottleneck.

The limit is the time of 2(n-1)/n of the bytes at the rate of one host's link. TCP and Ethernet headers take 4.4 % of
that rate. "bare sockets" (bare_sockets.py) only moves the same bytes: it shows which share of the limit the cores can
reach. "sockets and sums" also computes the sums.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path

import numpy as np
from bare_sockets import bare_sockets, sockets_and_sums
from measure import init_under_mpirun, machine, on_test_hosts, save, used_by_others

import ring_plugins as ring
from ring_plugins.benchmarking import Backend, Times, bucket, gloo, interleaved, ordinary
from ring_plugins.benchmarking import mpi as flat_mpi
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.net import mpi
from ring_plugins.core.world import current

SIZES = [64, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20]
RANKS = "two ranks of one thread per test host, which share these cores"
#: Measured by default: hosts, rate of a link, bytes of the largest message.
NETWORKS = [
    (2, "10gbit", 100 << 20),
    (2, "1gbit", 25 << 20),
    (2, None, 100 << 20),
    (3, "10gbit", 25 << 20),
    (4, "10gbit", 100 << 20),
    (4, "1gbit", 25 << 20),
    (4, None, 25 << 20),
]


def over_mpi() -> Backend:
    """ring_plugins with MPI between the hosts instead of sockets."""
    world = current()
    communicator = HostCommunicator(
        "over MPI",
        world.topology.rank,
        world.members.here.node,
        2 * world.topology.rank,
        world.communicator.all_gather_object,
        world.failure_detector,
        mpi.MpiTransport(),
    )

    def make(nbytes: int):
        array = np.ones(nbytes // 4, np.float32)
        return lambda: communicator.all_reduce(HostMemory(array, "float32"), Op.AVERAGE)

    return make


def worker(options: argparse.Namespace) -> None:
    """Measure on this rank, which mpirun has started so that MPI can be measured too; ring_plugins uses sockets."""
    with contextlib.suppress(OSError):  # priority over other sessions of this machine
        Path("/proc/self/autogroup").write_text("-20")
    init_under_mpirun(options.address)
    variants: dict[str, Backend] = {"ring": ordinary, "ring bucket": bucket, "ring over MPI": over_mpi()}
    variants |= {"bare sockets": bare_sockets(), "sockets and sums": sockets_and_sums(), "MPI": flat_mpi}
    variants |= {} if options.without_gloo else {"gloo": gloo}
    rows: dict[int, dict[str, Times]] = {}
    for nbytes in [size for size in SIZES if size <= (options.largest or SIZES[-1])]:
        made = {name: make(nbytes) for name, make in variants.items()}
        probe = interleaved(made, 2, 1)
        repetitions = int(min(200, max(5, options.seconds / sum(times.median for times in probe.values()))))
        rows[nbytes] = interleaved(made, repetitions, 1)
        if ring.rank() == 0:
            text = "  ".join(f"{name} {times.median * 1e3:,.3f} ms" for name, times in rows[nbytes].items())
            print(f"{nbytes:>12,} B  {text}", flush=True)
    shared = used_by_others(float(ring.all_reduce(time.process_time(), ring.SUM)))
    if ring.rank() == 0 and options.out:
        seconds = {nbytes: {name: vars(times) for name, times in row.items()} for nbytes, row in rows.items()}
        record = {"hosts": ring.num_nodes(), "ranks": ring.size(), "shared": shared, "seconds": seconds}
        Path(options.out).write_text(json.dumps(record))
    ring.barrier()


def limit(nbytes: int, hosts: int, rate: str | None) -> float:
    """Seconds that the wire alone takes; 0 if it has no limit."""
    if rate is None:
        return 0.0
    return 2 * (hosts - 1) / hosts * nbytes * 8 / (float(rate.removesuffix("gbit")) * 1e9)


def measure(number: int, rate: str | None, arguments: list[str]) -> dict[str, object]:
    """Measure on test hosts, two ranks each."""
    found = on_test_hosts(__file__, number, rate, arguments, GLOO_SOCKET_IFNAME="eth0")
    return {**json.loads(found), "rate": rate}


def report(record: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows: dict[str, dict[str, dict[str, float]]] = record["seconds"]  # type: ignore[assignment]
    hosts, rate = int(str(record["hosts"])), record["rate"]
    names = list(next(iter(rows.values())))
    caption = machine(RANKS, float(str(record["shared"])))
    table = Table(title=f"{hosts} hosts, {record['ranks']} ranks, {rate or 'no limit'}: median ms", caption=caption)
    ratios = (
        "limit / ring",
        "limit / bucket",
        "bare / ring",
        "bare / bucket",
        "sums / bucket",
        "MPI / ring",
        "gloo / ring",
    )
    for title in ("bytes", *names, "limit", *ratios):
        table.add_column(title, justify="right")
    for size, times in rows.items():
        m = {name: t["median"] for name, t in times.items()}
        least = limit(int(size), hosts, rate if rate is None else str(rate))
        shares = [f"{least / m[name]:.2f}" if least else "" for name in ("ring", "ring bucket")]
        shares += [f"{m['bare sockets'] / m[name]:.2f}" for name in ("ring", "ring bucket")]
        shares += [f"{m['sockets and sums'] / m['ring bucket']:.2f}"]
        shares += [f"{m[name] / m['ring']:.2f}" if name in m else "" for name in ("MPI", "gloo")]
        table.add_row(f"{int(size):,}", *(f"{m[n] * 1e3:,.3f}" for n in names), f"{least * 1e3:,.3f}", *shares)
    Console(width=200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, action="append", help="number of test hosts; may be repeated")
    parser.add_argument("--rate", action="append", help="rate of each link: 1gbit, 10gbit, none; may be repeated")
    parser.add_argument("--largest", type=int, help="bytes of the largest message, at most 100 MiB")
    parser.add_argument("--seconds", type=float, default=2.0, help="approximate time to spend on each size")
    parser.add_argument("--without-gloo", action="store_true", help="measure without gloo, and without importing torch")
    parser.add_argument("--here", action="store_true", help="measure among the ranks that mpirun started")
    parser.add_argument("--address", help="address of rank 0's host, with --here")
    parser.add_argument("--out", help="file for the result, with --here")
    options = parser.parse_args()
    if options.here:
        worker(options)
        return
    networks = NETWORKS
    if options.hosts or options.rate:
        rates = [None if rate == "none" else rate for rate in options.rate or ["10gbit"]]
        networks = [(number, rate, SIZES[-1]) for number in options.hosts or [2] for rate in rates]
    records = []
    for number, rate, largest in networks:
        passed = ["--largest", str(options.largest or largest), "--seconds", str(options.seconds)]
        records.append(measure(number, rate, passed + (["--without-gloo"] if options.without_gloo else [])))
        report(records[-1])
    if networks is NETWORKS:
        shared = max(float(str(one["shared"])) for one in records)
        save("between_hosts", {"networks": records}, RANKS, shared)


if __name__ == "__main__":
    main()
