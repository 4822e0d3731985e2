"""All-reduce of float32 on two ranks: ring_plugins beside torch's gloo, MPI and a plain copy of the same bytes.

    mpirun -n 2 python benchmarks/all_reduce.py            # everything, two to three minutes
    mpirun -n 2 python benchmarks/all_reduce.py --largest 1048576

Small messages are called twenty times for one sample, as MPI's own benchmarks do.
"ordinary" is memory from numpy, "bucket" memory from the communicator, as gradients live in.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import numpy as np
from measure import Times, interleaved, machine, save

import ring_plugins as ring
from ring_plugins.core.world import current

Variant = Callable[[np.ndarray], Callable[[], None]]


def ordinary(array: np.ndarray) -> Callable[[], None]:
    return lambda: ring.all_reduce(array, out=array)


def bucket(array: np.ndarray) -> Callable[[], None]:
    communicator = current().communicator
    shared = communicator.allocate(array.nbytes).array.view(np.float32)
    shared[:] = array
    return lambda: ring.all_reduce(shared, out=shared)


def plain_copy(array: np.ndarray) -> Callable[[], None]:
    target = np.empty_like(array)
    return lambda: np.copyto(target, array)


def mpi(array: np.ndarray) -> Callable[[], None]:
    from mpi4py import MPI

    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array, MPI.SUM)


def gloo(array: np.ndarray) -> Callable[[], None]:
    import torch
    import torch.distributed as dist

    tensor = torch.from_numpy(array)
    return lambda: dist.all_reduce(tensor)


def start_gloo() -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if ring.rank() == 0 else None
    port = ring.broadcast_object(store.port if store else 0)
    store = store or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=ring.rank(), world_size=ring.size())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=256 << 20, help="bytes of the largest message")
    parser.add_argument("--seconds", type=float, default=3.0, help="to spend on each size, about")
    options = parser.parse_args()

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ring.init(ranks=2)
    variants: dict[str, Variant] = {"ordinary": ordinary, "bucket": bucket, "plain copy": plain_copy}
    if current().launcher == "mpi":
        variants["mpi"] = mpi
    try:
        start_gloo()
        variants["gloo"] = gloo
    except ImportError:
        pass

    sizes = [s for s in (64 << shift for shift in range(24)) if s <= options.largest]
    sizes = sorted({*(s for s in sizes if s in (64, 512) or (s >= 4096 and s.bit_length() % 2 == 1)), *(
        s for s in (64 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20, 256 << 20) if s <= options.largest)})  # fmt: skip
    rows: dict[int, dict[str, Times]] = {}
    for size in sizes:
        made = {name: make(np.ones(size // 4, np.float32)) for name, make in variants.items()}
        calls = 20 if size <= 64 << 10 else 1
        probe = interleaved(made, 3, calls)
        per_repetition = calls * sum(times.median for times in probe.values())
        rows[size] = interleaved(made, int(min(1000, max(9, options.seconds / per_repetition))), calls)
        if ring.rank() == 0:
            print(
                f"{size:>12,} B  " + "  ".join(f"{n} {t.median * 1e6:,.1f} µs" for n, t in rows[size].items()),
                flush=True,
            )
    if ring.rank() == 0:
        report(rows)
    ring.barrier()


def report(rows: dict[int, dict[str, Times]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = list(next(iter(rows.values())))
    table = Table(title=f"all-reduce float32, {ring.size()} ranks: median µs (quartiles)", caption=machine())
    table.add_column("bytes", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    ratios = [("ordinary / copy", "ordinary", "plain copy"), ("bucket / copy", "bucket", "plain copy"),
              ("gloo / ordinary", "gloo", "ordinary"), ("mpi / ordinary", "mpi", "ordinary")]  # fmt: skip
    ratios = [r for r in ratios if r[1] in names and r[2] in names]
    for title, _, _ in ratios:
        table.add_column(title, justify="right")
    for size, times in rows.items():
        cells = [f"{t.median * 1e6:,.1f} ({t.low * 1e6:,.0f}-{t.high * 1e6:,.0f})" for t in times.values()]
        table.add_row(f"{size:,}", *cells, *(f"{times[a].median / times[b].median:.2f}" for _, a, b in ratios))
    Console(width=170).print(table)
    save(
        "all_reduce",
        {"ranks": ring.size(), "seconds": {s: {n: vars(t) for n, t in ts.items()} for s, ts in rows.items()}},
    )


if __name__ == "__main__":
    main()
