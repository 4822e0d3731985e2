"""What `on_failure="continue"` costs between hosts while nobody dies, and how soon the others go on after a loss.

    python benchmarks/healing_between_hosts.py cost --keep    # about two minutes, as root
    python benchmarks/healing_between_hosts.py kill --keep    # about a minute
    python benchmarks/healing_between_hosts.py cut --keep     # about two minutes, as root

"cost" trains as `healing.py cost` does, in turns, on test hosts (network namespaces, tests/hosts) with one rank each.
"end" averages while backward runs if that is faster, which "continue" cannot. "continue" needs a copy of the gradients,
so a third training, with "end", copies them once in each step for nothing.

"kill" kills ranks with SIGKILL at random moments, as `healing.py recovery` does, where each rank acts as a host.

"cut" unplugs one test host after the other. It measures from there to the end of the first step that the slowest of the
others finishes without that host.

--keep writes benchmarks/results/healing_between_hosts.json, and keeps there what the other two have measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from healing import WARM_UP, median_of, mortal_training, perceptron, training, turns
from measure import RESULTS, load, save, used_by_others
from torch import nn
from training_step import step

import ring_plugins as ring
from ring_plugins.core.base import config
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters

NAME = "healing_between_hosts"
HOSTS = (2, 4)


def large() -> tuple[nn.Module, torch.Tensor]:
    """25 MiB of parameters."""
    layers = [nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 128)]
    return nn.Sequential(*layers), torch.randn(16, 1024)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {"0.8 MB": perceptron, "25 MiB": large}


# On a rank ----------------------------------------------------------------------------------------


def cost_here(options: argparse.Namespace) -> None:
    """Measure on this rank of several hosts."""
    ring.init(on_failure="continue")
    rows: dict[str, Any] = {}
    for name, make in NETWORKS.items():
        ways = [training(make, False), training(make, True), training(make, False, copies=True)]
        for i in range(WARM_UP):
            ways[0]()
            ways[2]()
            if i < 5:
                ways[1]()
        probe = float(turns(ways, 5)[:, :, 0].sum(axis=1).mean())
        found = turns(ways, max(20, int(options.seconds / probe)))
        end, goes_on, copied = found[:, 0, 0], found[:, 1, 0], found[:, 2, 0]
        rows[name] = {
            "turns": len(found), "end": float(np.median(end)),
            "more": median_of(goes_on - end), "copy": median_of(copied - end),
        }  # fmt: skip
    if ring.rank() == 0:
        Path(options.out).write_text(json.dumps(rows))
    ring.barrier()


def cut_here(options: argparse.Namespace) -> None:
    """Train until this rank is alone, and note when each step ended, with how many ranks."""
    ring.init(on_failure="continue")
    me = ring.rank()
    torch.manual_seed(0)
    model, x = perceptron()
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model.named_parameters())
    run = step(model, optimizer, x, torch.randint(0, 10, (x.shape[0],)))  # type: ignore[arg-type]
    alone = 0
    with open(f"{options.out}-{me}", "w", buffering=1) as file:
        while alone < 50:
            run()
            file.write(f"{time.monotonic()} {ring.size()}\n")
            alone += ring.size() == 1


# In this process ----------------------------------------------------------------------------------


def cost(options: argparse.Namespace) -> dict[str, Any]:
    from tests.hosts import hosts

    rows = {}
    for number in HOSTS:
        with hosts(number) as cluster:
            out = cluster.directory / "result"
            arguments = ["cost", "--here", "--out", str(out), "--seconds", str(options.seconds)]
            path = f"{Path(__file__).parent}:{cluster.environment_variables()['PYTHONPATH']}"
            result = cluster.environment(Path(__file__), 1, arguments, {"PYTHONPATH": path}).run(300, check=False)
            if not out.exists():
                raise SystemExit(str(result))
            rows[str(number)] = json.loads(out.read_text())
        for name, row in rows[str(number)].items():
            print(
                f"{number} hosts, {name}: end {row['end'] * 1e3:.2f} ms, continue {in_ms(row['more'])}, a copy "
                f"{in_ms(row['copy'])}, {row['turns']} turns",
                flush=True,
            )
    return rows


def in_ms(seconds: Sequence[float]) -> str:
    """A difference with its interval."""
    more, low, high = (1e3 * value for value in seconds)
    return f"{more:+.2f} ms ({low:+.2f} to {high:+.2f})"


def kill(options: argparse.Namespace) -> dict[str, Any]:
    from tests.forked_ranks import run_forked

    torch.set_num_threads(1)
    rows, file = {}, Path(f"/tmp/deaths-{os.getpid()}")
    for number in HOSTS:
        seconds: list[float] = []
        for seed in range(1, options.losses + 1):
            if len(seconds) >= options.losses:
                break
            file.write_text("")
            deaths = number - 1
            job = run_forked(
                number, mortal_training(seed, number, deaths), 60, {"DEATHS": str(file)}, nodes=",".join("1" * number)
            )
            moments = sorted(map(float, file.read_text().split()))
            if len(job.found) != 1 or len(moments) != deaths:
                raise SystemExit(f"a job of {number} ranks ended otherwise: {job}")
            for place, moment in enumerate(moments):
                seconds.append(first_step_after(moment, number - 1 - place, job.found.values()) - moment)
        rows[str(number)] = summary(seconds)
        print(f"{number} hosts: {told(rows[str(number)])}", flush=True)
    file.unlink()
    return rows


def cut(options: argparse.Namespace) -> dict[str, Any]:
    seconds: list[float] = []
    while len(seconds) < options.losses / 2:  # each takes RING_NETWORK_TIMEOUT
        seconds += cut_one_after_the_other(HOSTS[-1])
        print(f"{len(seconds)} cuts so far: {told(summary(seconds))}", flush=True)
    return {**summary(seconds), "timeout": config.NETWORK_TIMEOUT.get()}


def cut_one_after_the_other(number: int) -> list[float]:
    """Of so many hosts; returns the seconds of each."""
    from tests.hosts import hosts

    with hosts(number) as cluster:
        out = cluster.directory / "steps"

        def has_steps(ranks: int, size: int) -> bool:
            return all(sum(left == size for _, left in steps(out, rank)) > 20 for rank in range(ranks))

        path = f"{Path(__file__).parent}:{cluster.environment_variables()['PYTHONPATH']}"
        arguments = ["cut", "--here", "--out", str(out)]
        seconds = []
        with cluster.environment(Path(__file__), 1, arguments, {"PYTHONPATH": path}):
            for left in range(number - 1, 0, -1):
                wait_until(partial(has_steps, left + 1, left + 1))
                time.sleep(random.random())
                moment = time.monotonic()
                cluster.cut(cluster.hosts[left])
                wait_until(partial(has_steps, left, left))
                ended = [list(steps(out, rank)) for rank in range(left)]
                seconds.append(first_step_after(moment, left, ended) - moment)
    return seconds


def steps(out: Path, rank: int) -> Iterator[tuple[float, int]]:
    """When each whole step of a rank ended, and with how many ranks."""
    file = Path(f"{out}-{rank}")
    for line in file.read_text().splitlines(keepends=True) if file.exists() else ():
        if line.endswith("\n"):
            at, size = line.split()
            yield float(at), int(size)


def wait_until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not ready():
        if time.monotonic() > end:
            raise SystemExit("nothing happens any more")
        time.sleep(0.05)


def first_step_after(moment: float, size: int, by_rank: Any) -> float:
    """When the slowest of the others ended its first step with so few ranks."""
    return max(next(at for at, left in ended if at > moment and left <= size) for ended in by_rank)


def summary(seconds: Sequence[float]) -> dict[str, float]:
    return {"losses": len(seconds), "median": float(np.median(seconds)), "worst": float(max(seconds))}


def told(row: dict[str, float]) -> str:
    return f"median {row['median'] * 1e3:.0f} ms, worst {row['worst'] * 1e3:.0f} ms, {row['losses']} losses"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "kill", "cut"])
    parser.add_argument("--seconds", type=float, default=15.0, help="cost: approximate time for each model")
    parser.add_argument(
        "--losses", type=int, default=30, help="kill: for each number of hosts; cut: half as many in all"
    )
    parser.add_argument("--keep", action="store_true", help="write the result")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        {"cost": cost_here, "cut": cut_here}[options.what](options)
        return
    found = {"cost": cost, "kill": kill, "cut": cut}[options.what](options)
    if options.keep:
        kept = load(NAME) if (RESULTS / f"{NAME}.json").exists() else {}
        kept.pop("machine", None)
        spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        shared = used_by_others(sum(one.ru_utime + one.ru_stime for one in spent))
        ranks = "1 rank of 1 thread on each test host, which share these cores"
        save(NAME, {**kept, options.what: found}, ranks, shared)


if __name__ == "__main__":
    main()
