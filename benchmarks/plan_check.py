"""Compare steps that `ring plan` predicts for two hosts with measured ones.

    python benchmarks/plan_check.py            # as root, about four minutes

The hosts are network namespaces of this machine with links shaped to each rate (tests/hosts), one rank each. One job
measures the network as `ring bench` does, the model as `ring_plugins.planning.measure` does, and the step with and
without communication, in turn. The prediction uses all measurements except the step with communication. Figures are
lower quartiles, because other programs use this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests.hosts

RATES = ("500mbit", "1gbit", "2.5gbit", "5gbit")
SIZES = (4 << 10, 64 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20)


def rank(seconds: float) -> None:
    """Measure on this rank."""
    import torch
    from training_step import MODELS, step

    import ring_plugins as ring
    from ring_plugins.benchmarking import all_reduce_curve, host_backends, interleaved
    from ring_plugins.planning import measure, predict
    from ring_plugins.planning.simulation import fitted
    from ring_plugins.torch import DistributedOptimizer

    torch.set_num_threads(1)  # each rank has one core
    ring.init()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[ring.rank()]})
    take_the_core()
    found: dict[str, object] = {}
    for name, make in MODELS.items():
        steps: dict[str, Callable[[], None]] = {}
        for variant in ("alone", "together"):
            torch.manual_seed(0)
            model, x = make()
            y = torch.randint(0, 10, (x.shape[0],))
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            if variant == "alone":
                ring.barrier()
                profile = measure(model, (x, y), optimizer=optimizer, steps=7)
            else:
                optimizer = DistributedOptimizer(optimizer, model.named_parameters())
            steps[variant] = step(model, optimizer, x, y)
        steps["together"]()
        take_the_core()
        curve = all_reduce_curve(host_backends(("ring",)), SIZES, seconds / 8)
        network = fitted("", [(size, times["ring"].low) for size, times in curve.times.items()], 2, 2)
        probe = interleaved(steps, 2, warm_up=1)
        times = interleaved(steps, int(max(5, seconds / sum(t.median for t in probe.values()))))
        alone, together = times["alone"].low, times["together"].low
        prediction = predict(profile.at_step(alone), network, 2, jitter=0.0, overlap=False)
        found[name] = {
            "alone": alone,
            "measured": together,
            "predicted": prediction.step,
            "alpha": network.transport.alpha,
            "gigabits": network.gigabits,
        }
    if ring.rank() == 0:
        print(json.dumps(found))


def take_the_core() -> None:
    """Give this rank priority over other programs of this machine, and its communication over its computation.

    Each rank has one core for both, and the kernel moves packets only while the core is idle, so nothing overlaps.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        priority = 10 if thread == os.getpid() else 11
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="approximate time to spend on each model and rate")
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.seconds)
        return
    from measure import machine, save
    from rich.console import Console
    from rich.table import Table

    from tests.hosts import hosts

    results = {}
    with hosts(2, rate="1gbit") as cluster:
        for rate in options.rates:
            for host in cluster.hosts:
                cluster.shape(host, rate)
            arguments = ["--rank", "--seconds", str(options.seconds)]
            done = cluster.mpirun(Path(__file__).resolve(), 1, args=arguments).run(timeout=300)
            results[rate] = json.loads(done.stdout.splitlines()[-1])
    table = Table(title="a step of two ranks on two hosts, ms", caption=machine())
    for column in ("rate", "model", "alone", "measured", "predicted", "error", "alpha µs", "Gbit/s"):
        table.add_column(column, justify="right")
    for rate, found in results.items():
        for model, times in found.items():
            cells = [f"{times[what] * 1e3:.1f}" for what in ("alone", "measured", "predicted")]
            error = f"{100 * (times['predicted'] / times['measured'] - 1):+.1f} %"
            table.add_row(rate, model, *cells, error, f"{times['alpha'] * 1e6:.0f}", f"{times['gigabits']:.2f}")
    Console(width=100).print(table)
    save("plan_check", {"rates": results}, ranks="one rank of 1 thread per test host, each bound to a core")


if __name__ == "__main__":
    main()
