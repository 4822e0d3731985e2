"""Seconds to a loss at 1 Gbit/s: PowerSGD (DDP's own hook, over "ring") beside compression in 16 and 8 bits.

    python benchmarks/low_rank.py                    # two test hosts, as root, a quarter of an hour
    python benchmarks/low_rank.py --rate 100mbit     # printed only

The character GPT of local_updates.py, wider (3 million parameters), on the sources of the standard library. Weights,
batches and steps are the same in every run. PowerSGD (Vogels et al., 2019) begins after ten steps, with error feedback
and a warm start, as torch's defaults have it. The target is what synchronous training without compression has
reached after three quarters of its steps, as the mean of 20 steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import local_updates
import torch
import torch.distributed as dist
from measure import init_under_mpirun, machine, on_test_hosts, save, used_by_others
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer

local_updates.WIDTH, local_updates.LAYERS, local_updates.RATE = 256, 4, 1e-3
#: By name a codec of ours, or the rank of PowerSGD's matrices.
RUNS: dict[str, str | int | None] = {
    "none": None,
    "bf16": "bf16",
    "int8": "int8",
    "PowerSGD, rank 1": 1,
    "PowerSGD, rank 4": 4,
    "PowerSGD, rank 16": 16,
}
STEPS, MEAN, AFTER = 160, 20, 10
RANKS = "one rank of one thread per test host, which share these cores"


def train(run: str | int | None) -> tuple[list[float], list[float]]:
    """The mean loss of all ranks, and the seconds since the start, of each step."""
    data = local_updates.text()
    torch.manual_seed(0)
    model: torch.nn.Module = local_updates.GPT()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), local_updates.RATE)
    if isinstance(run, int):
        dist.init_process_group("ring")
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(
            PowerSGDState(None, matrix_approximation_rank=run, start_powerSGD_iter=AFTER), powerSGD_hook
        )
        model = wrapped
    else:
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression=run)
    generator = torch.Generator().manual_seed(1000 + ring.rank())
    losses, ends, began = [], list[float](), time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(local_updates.pieces(data, local_updates.BATCH, generator))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        ends.append(time.perf_counter() - began)
    return [float(one) for one in ring.all_reduce(torch.tensor(losses))], ends


def worker(options: argparse.Namespace) -> None:
    """One run among the ranks that mpirun has started."""
    torch.set_num_threads(1)
    init_under_mpirun(options.address)
    losses, ends = train(RUNS[options.run])
    shared = used_by_others(float(ring.all_reduce(time.process_time(), ring.SUM)))
    if ring.rank() == 0:
        record = {"run": options.run, "losses": losses, "ends": ends, "shared": shared}
        Path(options.out).write_text(json.dumps(record))


def report(records: list[dict[str, Any]]) -> None:
    """Print the seconds of a step, the last loss, and the seconds to the target."""
    means = {
        one["run"]: [statistics.mean(one["losses"][end - MEAN : end]) for end in range(MEAN, STEPS + 1)]
        for one in records
    }
    target = means["none"][STEPS * 3 // 4 - MEAN]
    for one in records:
        found = means[one["run"]]
        steps = [second - first for first, second in zip(one["ends"][AFTER:], one["ends"][AFTER + 1 :], strict=False)]
        place = next((place for place, mean in enumerate(found) if mean <= target), None)
        reached = "not reached" if place is None else f"{one['ends'][place + MEAN - 1]:.1f} s"
        print(
            f"  {one['run']}: {statistics.median(steps) * 1e3:.0f} ms a step, loss {found[-1]:.3f}, "
            f"{target:.3f} after: {reached}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="rate of each link, such as 100mbit; 1gbit by default, which is kept")
    parser.add_argument("--run", choices=RUNS, help="with --here")
    parser.add_argument("--here", action="store_true", help="one run among the ranks that mpirun started")
    parser.add_argument("--address", help="address of rank 0's host, with --here")
    parser.add_argument("--out", help="file for the result, with --here")
    options = parser.parse_args()
    if options.here:
        worker(options)
        return
    rate = options.rate or "1gbit"
    records = [json.loads(on_test_hosts(__file__, 2, rate, ["--run", name], ranks=1)) for name in RUNS]
    print(f"2 hosts at {rate}")
    report(records)
    shared = max(float(one["shared"]) for one in records)
    if not options.rate:
        save("low_rank", {"rate": rate, "runs": records}, RANKS, shared)
    print(machine(RANKS, shared))


if __name__ == "__main__":
    main()
