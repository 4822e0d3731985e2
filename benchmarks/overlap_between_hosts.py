"""Which way of averaging is faster between hosts, while backward runs or after it, and which one "auto" chooses.

    python benchmarks/overlap_between_hosts.py --rate 1gbit --models cnn        # as root; half a minute
    python benchmarks/overlap_between_hosts.py --rate 10gbit --ranks 2          # two ranks a host; about three minutes

Test hosts are network namespaces with shaped links (tests/hosts). They share this machine's cores: on two cores, a rank
of one thread has a core if there is one on each of two hosts, and half a core if there are two. The kernel's packets
come on top. "auto" is measured once it has decided.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from measure import init_under_mpirun, machine, on_test_hosts, used_by_others
from training_step import MODELS, NAMES, OVERLAPS, variants

import ring_plugins as ring
from ring_plugins.benchmarking import interleaved

HEADER = ("", *(f"{name}, ms" for name in (NAMES[0], *OVERLAPS)), "chosen", "steps until then", "auto / the better")


def worker(options: argparse.Namespace) -> None:
    """Measure on this rank of several hosts."""
    init_under_mpirun(options.address)
    lines = []
    for model in (name for name in MODELS if any(part in name for part in options.models)):
        made, ours = variants(MODELS[model], NAMES[:1] + tuple(OVERLAPS))
        overlap, steps = ours["auto"].averager._sets.overlap, 0
        while not overlap.finished:  # in the same step on all ranks
            made["auto"]()
            steps += 1
        probe = interleaved(made, 3)
        repetitions = int(max(9, options.seconds / sum(times.median for times in probe.values())))
        rows = interleaved(made, repetitions)
        cells = [f"{t.median * 1e3:.1f} ({t.low * 1e3:.1f}-{t.high * 1e3:.1f})" for t in rows.values()]
        auto, *fixed = (rows[name].median for name in OVERLAPS)
        chosen = "while backward runs" if overlap.now else "after backward"
        lines.append(" | ".join([f"| {model}", *cells, chosen, str(steps), f"{auto / min(fixed):.3f} |"]))
        for optimizer in ours.values():
            optimizer.close()
    shared = used_by_others(float(ring.all_reduce(time.process_time(), ring.SUM)))
    if ring.rank() == 0:
        Path(options.out).write_text("\n".join([*lines, "", f"({machine(shared=shared)})"]))
    ring.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="number of test hosts")
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each test host")
    parser.add_argument("--rate", default="10gbit", help="rate of each link; none for no limit")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="parts of their names")
    parser.add_argument("--seconds", type=float, default=20.0, help="approximate time to spend on each model")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        worker(options)
        return
    rate = None if options.rate == "none" else options.rate
    arguments = ["--seconds", str(options.seconds), "--models", *options.models]
    found = on_test_hosts(__file__, options.hosts, rate, arguments, options.ranks, OMP_NUM_THREADS="1")
    print("| " + " | ".join(HEADER) + " |\n| --- |" + " ---: |" * (len(HEADER) - 1))
    print(found)


if __name__ == "__main__":
    main()
