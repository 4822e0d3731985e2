"""Training steps on two ranks with one thread each: ring_plugins beside no communication and torch's DDP (gloo).

    mpirun -n 2 python benchmarks/training_step.py                  # about four minutes
    mpirun -n 2 python benchmarks/training_step.py --models cnn --seconds 5

A step is zero_grad, forward, backward and an SGD update. Every repetition runs all variants one after the other; the
time of a step is that of the slower rank. "no communication" trains the ranks independently.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable

import torch
from measure import machine, save
from torch import nn

import ring_plugins as ring
from ring_plugins.benchmarking import Times, interleaved, start_gloo
from ring_plugins.torch import DistributedOptimizer


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """67 MB of parameters in four layers, batches of 64: many bytes for little computation."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(2048, 10)), torch.randn(64, 2048)


class Transformer(nn.Module):
    """19 MB of parameters in six layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


def transformer() -> tuple[nn.Module, torch.Tensor]:
    return Transformer(), torch.randn(8, 64, 256)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    """1.5 MB of parameters: few bytes, and little computation to hide them."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 16, 320), nn.ReLU(), nn.Linear(320, 64), nn.ReLU(), nn.Linear(64, 10),
    ), torch.randn(64, 1, 8, 8)  # fmt: skip


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {"mlp": mlp, "transformer": transformer, "cnn": cnn}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return run


def variants(
    make: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> tuple[dict[str, Callable[[], None]], DistributedOptimizer]:
    """Return name -> step to time, and our optimizer, which records its waiting time."""
    made: dict[str, Callable[[], None]] = {}
    for name in ("no communication", "ring_plugins", "DDP (gloo)"):
        torch.manual_seed(0)
        model, x = make()
        y = torch.randint(0, 10, (x.shape[0],))
        if name.startswith("DDP"):
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        if name == "ring_plugins":
            optimizer = ours = DistributedOptimizer(optimizer, model.named_parameters())
        made[name] = step(model, optimizer, x, y)
    return made, ours


def shares(optimizer: DistributedOptimizer) -> dict[str, float]:
    """Per step: seconds that the communication thread worked, seconds that backward waited, and bytes reduced."""
    averager = optimizer.averager
    return {
        "reducing": averager._communicator.statistics.working / averager.steps,
        "waited": averager.waited_seconds / averager.steps,
        "bytes": averager.reduced_bytes / averager.steps,
    }


def keep_freed_memory() -> None:
    """Tell the C library not to return freed memory to the kernel.

    Otherwise it does so in some variants and not in others, which costs 10 ms of page faults in every step of the
    larger model, with or without communication.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(option, 1 << 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=60.0, help="approximate time to spend on each model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    ring.init(ranks=2)
    start_gloo()
    rows: dict[str, dict[str, Times]] = {}
    profile: dict[str, dict[str, float]] = {}
    for name in options.models:
        made, ours = variants(MODELS[name])
        probe = interleaved(made, 3)
        repetitions = int(max(9, options.seconds / sum(times.median for times in probe.values())))
        rows[name] = interleaved(made, repetitions)
        profile[name] = shares(ours)
        if ring.rank() == 0:
            print(f"{name}: " + "  ".join(f"{n} {t.median * 1e3:.2f} ms" for n, t in rows[name].items()), flush=True)
    if ring.rank() == 0:
        report(rows, profile)
    ring.barrier()


def report(rows: dict[str, dict[str, Times]], profile: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"training step, {ring.size()} ranks: median ms (quartiles)", caption=machine())
    names = list(next(iter(rows.values())))
    for column in ("model", *names, "ring / none", "ring / DDP", "reducing", "waited"):
        table.add_column(column, justify="right")
    for model, times in rows.items():
        cells = [f"{t.median * 1e3:.2f} ({t.low * 1e3:.2f}-{t.high * 1e3:.2f})" for t in times.values()]
        none, ours, ddp = (times[name].median for name in names)
        table.add_row(
            model,
            *cells,
            f"{ours / none:.3f}",
            f"{ours / ddp:.3f}",
            *(f"{profile[model][what] * 1e3:.2f}" for what in ("reducing", "waited")),
        )
    Console(width=160).print(table)
    seconds = {m: {n: vars(t) for n, t in ts.items()} for m, ts in rows.items()}
    save("training_step", {"ranks": ring.size(), "seconds": seconds, "profile": profile})


if __name__ == "__main__":
    main()
