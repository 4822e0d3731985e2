"""Training steps on two ranks, as users run them: ring_plugins beside no communication, a copy, and torch's DDP (gloo).

    mpirun -n 2 python benchmarks/training_step.py                  # about six minutes
    mpirun -n 2 python benchmarks/training_step.py --models cnn --seconds 5
    mpirun -n 2 python benchmarks/training_step.py --overlap        # both ways of averaging; about four minutes

A step is zero_grad, forward, backward and an SGD update. Every repetition runs all variants one after the other; the
time of a step is that of the slower rank. Numbers of threads are those that `init()` chooses, and nothing is bound or
prioritized.

"no communication" trains the ranks independently. "copied" also copies all gradients into a buffer and back after
backward: the least that any averaging outside of the gradients' own memory costs. With `--overlap`, "auto" is what
ring_plugins chooses in its first steps, and "while backward runs" and "after backward" are its choices.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from measure import machine, save
from torch import nn

import ring_plugins as ring
from ring_plugins.benchmarking import Times, interleaved, start_gloo
from ring_plugins.torch import DistributedOptimizer


def mlp(batch: int = 64) -> tuple[nn.Module, torch.Tensor]:
    """67 MB of parameters in four layers: many bytes for little computation."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(2048, 10)), torch.randn(batch, 2048)


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


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp, batch 32": lambda: mlp(32),
    "mlp, batch 64": mlp,
    "transformer": transformer,
    "cnn": cnn,
}
NAMES = "no communication", "copied", "ring_plugins", "DDP (gloo)"
#: With `--overlap`: the argument of `DistributedOptimizer`.
OVERLAPS: dict[str, Any] = {"auto": "auto", "while backward runs": True, "after backward": False}


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    after_backward: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        after_backward()
        optimizer.step()

    return run


def copying(model: nn.Module) -> Callable[[], None]:
    """A function that copies the gradients into a buffer and back."""
    parameters = list(model.parameters())
    parts = torch.zeros(sum(p.numel() for p in parameters)).split([p.numel() for p in parameters])
    buffers = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]

    def copy() -> None:
        gradients = [p.grad for p in parameters]
        torch._foreach_copy_(buffers, gradients)
        torch._foreach_copy_(gradients, buffers)

    return copy


def variants(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], names: Sequence[str]
) -> tuple[dict[str, Callable[[], None]], dict[str, DistributedOptimizer]]:
    """Return name -> step to time, and our optimizers, which record their waiting time."""
    made: dict[str, Callable[[], None]] = {}
    ours: dict[str, DistributedOptimizer] = {}
    for name in names:
        torch.manual_seed(0)
        model, x = make()
        y = torch.randint(0, 10, (x.shape[0],))
        if name.startswith("DDP"):
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        if name in ("ring_plugins", *OVERLAPS):
            overlap = OVERLAPS.get(name, "auto")
            optimizer = ours[name] = DistributedOptimizer(optimizer, model.named_parameters(), overlap=overlap)
        made[name] = step(model, optimizer, x, y, *([copying(model)] if name == "copied" else []))
    return made, ours


def shares(optimizer: DistributedOptimizer) -> dict[str, float]:
    """Per step: seconds that reductions took, seconds that backward waited, and bytes reduced."""
    averager = optimizer.averager
    return {
        "reducing": averager.communicator.statistics.working / averager.steps,
        "waited": averager.waited_seconds / averager.steps,
        "bytes": averager.reduced_bytes / averager.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), help="parts of their names; the result is kept only with all"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="approximate time to spend on each model")
    parser.add_argument("--overlap", action="store_true", help="compare the values of `overlap`")
    options = parser.parse_args()
    ring.init(ranks=2)
    names = NAMES[:1] + tuple(OVERLAPS) if options.overlap else NAMES
    if not options.overlap:
        start_gloo()
    rows: dict[str, dict[str, Times]] = {}
    profile: dict[str, dict[str, float]] = {}
    for name in (name for name in MODELS if any(part in name for part in options.models)):
        made, ours = variants(MODELS[name], names)
        for _ in range(110):  # in which ring_plugins decides whether to overlap
            made["auto" if options.overlap else "ring_plugins"]()
        probe = interleaved(made, 3)
        repetitions = int(max(9, options.seconds / sum(times.median for times in probe.values())))
        rows[name] = interleaved(made, repetitions)
        if not options.overlap:
            profile[name] = shares(ours["ring_plugins"])
        if ring.rank() == 0:
            print(f"{name}: " + "  ".join(f"{n} {t.median * 1e3:.2f} ms" for n, t in rows[name].items()), flush=True)
    if ring.rank() == 0 and options.overlap:
        report_overlap(rows)
    elif ring.rank() == 0:
        report(rows, profile)
    ring.barrier()


def report_overlap(rows: dict[str, dict[str, Times]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"training step, {ring.size()} ranks: median ms (quartiles)", caption=machine())
    columns = ("model", NAMES[0], *OVERLAPS, "auto / the better")
    for column in columns:
        table.add_column(column, justify="right")
    for model, times in rows.items():
        cells = [f"{t.median * 1e3:.2f} ({t.low * 1e3:.2f}-{t.high * 1e3:.2f})" for t in times.values()]
        auto, *fixed = (times[name].median for name in OVERLAPS)
        table.add_row(model, *cells, f"{auto / min(fixed):.3f}")
    Console(width=160).print(table)
    if len(rows) == len(MODELS):
        save(
            "overlap",
            {"ranks": ring.size(), "seconds": {m: {n: vars(t) for n, t in ts.items()} for m, ts in rows.items()}},
        )


def report(rows: dict[str, dict[str, Times]], profile: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"training step, {ring.size()} ranks: median ms (quartiles)", caption=machine())
    names = list(next(iter(rows.values())))
    for column in ("model", *names, "copied / none", "ring / none", "ring / DDP", "reducing", "waited"):
        table.add_column(column, justify="right")
    for model, times in rows.items():
        cells = [f"{t.median * 1e3:.2f} ({t.low * 1e3:.2f}-{t.high * 1e3:.2f})" for t in times.values()]
        none, copied, ours, ddp = (times[name].median for name in names)
        table.add_row(
            model,
            *cells,
            f"{copied / none:.3f}",
            f"{ours / none:.3f}",
            f"{ours / ddp:.3f}",
            *(f"{profile[model][what] * 1e3:.2f}" for what in ("reducing", "waited")),
        )
    Console(width=190).print(table)
    seconds = {m: {n: vars(t) for n, t in ts.items()} for m, ts in rows.items()}
    if len(rows) == len(MODELS):
        save("training_step", {"ranks": ring.size(), "seconds": seconds, "profile": profile})


if __name__ == "__main__":
    main()
