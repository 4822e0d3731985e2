"""Peak memory of training with two ranks, with and without averaging.

    python benchmarks/memory.py            # half a minute

Each variant runs in new processes. The figure is the peak resident memory of the larger rank, which includes all shared
memory. Growth is given in multiples of the gradients' bytes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

VARIANTS = ("no communication", "ring_plugins", "DDP (gloo)", "DDP (gloo), views")

RANKS = "2 ranks on 1 host, each with its share of the cores"


def rank(variant: str) -> None:
    """Run a few steps of one variant on this rank, with a model of 320 MB of parameters."""
    import torch
    from torch import nn

    import ring_plugins as ring
    from ring_plugins.benchmarking import start_gloo
    from ring_plugins.torch import DistributedOptimizer

    ring.init(ranks=2)
    torch.manual_seed(0)  # equal weights on all ranks
    layers = [layer for _ in range(18) for layer in (nn.Linear(2100, 2100), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(2100, 10))
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    if variant.startswith("DDP"):
        start_gloo()
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=variant.endswith("views"))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    if variant == "ring_plugins":
        optimizer = DistributedOptimizer(optimizer, model.named_parameters())
    x, y = torch.randn(16, 2100), torch.randint(0, 10, (16,))
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    peak = ring.all_reduce(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, ring.MAX)
    if ring.rank() == 0:
        print(json.dumps({"peak": int(peak), "gradients": nbytes}))


def main() -> None:
    from measure import machine, save
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    peaks: dict[str, int] = {}
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    for variant in track(VARIANTS, "measuring"):
        done = subprocess.run([sys.executable, __file__, variant], env=environment, stdout=subprocess.PIPE, check=True)
        record = json.loads(done.stdout.splitlines()[-1])
        peaks[variant] = record["peak"]
    gradients = record["gradients"]
    table = Table(title=f"peak resident memory per rank; gradients {gradients / 1e6:.0f} MB", caption=machine(RANKS))
    for column in ("", "MB", "growth / gradients"):
        table.add_column(column, justify="right")
    for variant, peak in peaks.items():
        growth = (peak - peaks["no communication"]) / gradients
        table.add_row(variant, f"{peak / 1e6:,.0f}", f"{growth:.2f}")
    Console(width=100).print(table)
    save("memory", {"gradients": gradients, "peak": peaks}, RANKS)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(sys.argv[1])
    else:
        main()
