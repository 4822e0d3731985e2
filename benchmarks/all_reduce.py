"""All-reduce of float32 on two ranks: ring_plugins beside torch's gloo, MPI and a plain copy of the same bytes.

    mpirun -n 2 python benchmarks/all_reduce.py            # all sizes, two to three minutes
    mpirun -n 2 python benchmarks/all_reduce.py --largest 1048576

"ring" reduces memory from numpy, "ring bucket" memory that the communicator allocated, as for buckets. `ring bench`
measures the same in any job; this script adds the sizes and ratios of docs/performance.md, and saves them.
"""

from __future__ import annotations

import argparse

from measure import machine, save

import ring_plugins as ring
from ring_plugins.benchmarking import Times, all_reduce_curve, host_backends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=256 << 20, help="bytes of the largest message")
    parser.add_argument("--seconds", type=float, default=3.0, help="approximate time to spend on each size")
    options = parser.parse_args()

    ring.init(ranks=2)
    sizes = [s for s in (64 << shift for shift in range(24)) if s <= options.largest]
    sizes = sorted({*(s for s in sizes if s in (64, 512) or (s >= 4096 and s.bit_length() % 2 == 1)), *(
        s for s in (64 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20, 256 << 20) if s <= options.largest)})  # fmt: skip

    def show(size: int, times: dict[str, Times]) -> None:
        if ring.rank() == 0:
            print(f"{size:>12,} B  " + "  ".join(f"{n} {t.median * 1e6:,.1f} µs" for n, t in times.items()), flush=True)

    curve = all_reduce_curve(host_backends(), sizes, options.seconds, show)
    if ring.rank() == 0:
        report(curve.times)
    ring.barrier()


def report(rows: dict[int, dict[str, Times]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = list(next(iter(rows.values())))
    table = Table(title=f"all-reduce float32, {ring.size()} ranks: median µs (quartiles)", caption=machine())
    table.add_column("bytes", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    ratios = [("ring / copy", "ring", "plain copy"), ("bucket / copy", "ring bucket", "plain copy"),
              ("gloo / ring", "gloo", "ring"), ("MPI / ring", "MPI", "ring")]  # fmt: skip
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
