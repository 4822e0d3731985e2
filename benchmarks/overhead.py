"""Processor time per training step in ring_plugins' Python, by number of parameters and ranks.

    python benchmarks/overhead.py            # about a minute

The parameters are tiny, so there is almost nothing to send. The figure is the processor time per step of all threads of
one rank, with averaging minus without, so it is valid even if ranks share cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

PARAMETERS = (10, 100, 1000, 5000)
RANKS = (1, 2, 3, 4, 8)
#: First steps, which do not count: in them ring_plugins decides whether to overlap.
TRIAL = 110


def rank(ranks: int, steps: int) -> None:
    """Measure the same model with and without averaging on one rank, for each number of parameters."""
    import numpy as np
    import torch
    from torch import nn

    import ring_plugins as ring
    from ring_plugins.torch import DistributedOptimizer

    torch.set_num_threads(1)  # other threads' time would count as averaging
    ring.init(ranks=ranks)
    rows = {}
    for count in PARAMETERS:
        # Each has weights of its own: with one set, the step without averaging would call the hooks as well.
        models = {name: [nn.Parameter(torch.zeros(16)) for _ in range(count)] for name in ("plain", "ring")}
        averaging = DistributedOptimizer(torch.optim.SGD(models["ring"], 1e-3))
        optimizers = {"plain": torch.optim.SGD(models["plain"], 1e-3), "ring": averaging}
        seconds: dict[str, list[float]] = {"plain": [], "ring": []}
        for step in range(TRIAL + steps):
            for name, weights in models.items():
                ring.barrier()
                started = time.process_time()
                optimizers[name].zero_grad()
                torch.stack([w.sum() for w in weights]).sum().backward()
                optimizers[name].step()
                if step >= TRIAL:
                    seconds[name].append(time.process_time() - started)
        averaging.close()
        medians = {name: float(np.median(values)) for name, values in seconds.items()}
        rows[count] = [medians["plain"], ring.all_reduce(medians["ring"] - medians["plain"], ring.MAX)]
    if ring.rank() == 0:
        print(json.dumps({count: [a, float(b)] for count, (a, b) in rows.items()}))


def main() -> None:
    from measure import machine, save
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.steps)
        return
    results = {}
    for ranks in track(RANKS, "measuring"):
        command = [sys.executable, __file__, "--rank", str(ranks), "--steps", str(options.steps)]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True)
        results[ranks] = json.loads(done.stdout.splitlines()[-1])
    table = Table(
        title="processor time per step for averaging, ms (µs per parameter)", caption=machine("1 thread a rank")
    )
    table.add_column("ranks", justify="right")
    for count in PARAMETERS:
        table.add_column(f"{count:,} parameters", justify="right")
    for ranks, row in results.items():
        table.add_row(str(ranks), *(f"{b * 1e3:.2f} ({b * 1e6 / int(count):.1f})" for count, (_, b) in row.items()))
    Console(width=120).print(table)
    save(
        "overhead",
        {"seconds": {r: {c: b for c, (_, b) in row.items()} for r, row in results.items()}},
        "1 thread a rank",
    )


if __name__ == "__main__":
    main()
