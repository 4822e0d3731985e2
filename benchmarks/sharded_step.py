"""Training steps with Adam: sharded updates beside plain averaging and torch's ZeroRedundancyOptimizer.

    python benchmarks/sharded_step.py                               # about two minutes
    python benchmarks/sharded_step.py --ranks 4 --fused

The model is the MLP of training_step.py: 67 MB of parameters, batches of 64. A step is zero_grad, forward, backward and
an Adam update. Every repetition runs all variants one after the other; the time of a step is
that of the slowest rank. CPU time, of all threads of a rank, depends less on what else the machine does. Memory is
what the optimizer keeps on a rank, as a share of what one rank alone would keep.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import machine, save
from torch.distributed.optim import ZeroRedundancyOptimizer
from training_step import mlp, step

import ring_plugins as ring
from ring_plugins.benchmarking import interleaved, start_gloo
from ring_plugins.torch import DistributedOptimizer

PLAIN, SHARDED, ZERO_GLOO, ZERO_RING = "plain averaging", "sharded", "ZeRO (gloo)", "ZeRO (ring)"


def variants(names: list[str], options: dict[str, Any]) -> tuple[dict[str, Callable[[], None]], dict[str, Any]]:
    """Return name -> step to time, and name -> optimizer."""
    made: dict[str, Callable[[], None]] = {}
    optimizers: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        model, x = mlp()
        y = torch.randint(0, 10, (x.shape[0],))
        optimizer: Any
        if name in (PLAIN, SHARDED):
            adam = torch.optim.Adam(model.parameters(), 1e-4, **options)
            optimizer = DistributedOptimizer(adam, model.named_parameters(), shard=name == SHARDED)
            optimizers[name] = optimizer
        else:
            group = dist.new_group(backend="ring") if name == ZERO_RING else dist.group.WORLD
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.Adam, process_group=group, lr=1e-4, **options
            )
            model = torch.nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
            optimizers[name] = optimizer.optim
        made[name] = step(model, optimizer, x, y)
    return made, optimizers


def counting(run: Callable[[], None], seconds: list[float]) -> Callable[[], None]:
    """`run`, which also notes the CPU time of this process."""

    def counted() -> None:
        before = time.process_time()
        run()
        seconds.append(time.process_time() - before)

    return counted


def state_bytes(optimizer: Any) -> int:
    states = optimizer.state.values()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="approximate time to spend")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start, unless a launcher did")
    parser.add_argument("--fused", action="store_true", help="use torch's fused Adam")
    parser.add_argument("--only", nargs="+", default=[PLAIN, SHARDED, ZERO_GLOO, ZERO_RING])
    options = parser.parse_args()
    ring.init(ranks=options.ranks)
    start_gloo()
    made, optimizers = variants(options.only, {"fused": True} if options.fused else {})
    probe = interleaved(made, 3)
    repetitions = int(max(7, options.seconds / sum(times.median for times in probe.values())))
    cpu: dict[str, list[float]] = {name: [] for name in made}
    times = interleaved({name: counting(run, cpu[name]) for name, run in made.items()}, repetitions)
    cpu_medians = ring.all_gather_object({name: statistics.median(seconds) for name, seconds in cpu.items()})
    busiest = {name: max(of[name] for of in cpu_medians) for name in made}
    memory = {name: max(ring.all_gather_object(state_bytes(optimizer))) for name, optimizer in optimizers.items()}
    if ring.rank() == 0:
        base, whole = times[PLAIN].median, memory[PLAIN]
        print(f"{machine()}, Adam{' fused' if options.fused else ''}, {repetitions} repetitions")
        for name, t in times.items():
            print(
                f"{name:>16}: {t.median * 1e3:7.1f} ms ({t.low * 1e3:.1f}-{t.high * 1e3:.1f}), "
                f"{t.median / base:.2f} of plain; "
                f"CPU {busiest[name] * 1e3:6.1f} ms, {busiest[name] / busiest[PLAIN]:.2f}; "
                f"state {memory[name] / 1e6:6.1f} MB, {memory[name] / whole:.2f} of plain"
            )
        save(
            f"sharded_step_{ring.size()}{'_fused' if options.fused else ''}",
            {
                "ranks": ring.size(),
                "seconds": {n: vars(t) for n, t in times.items()},
                "cpu": busiest,
                "state_bytes": memory,
            },
        )
    ring.barrier()


if __name__ == "__main__":
    main()
