"""What `on_failure="continue"` costs while nobody dies, and how soon the others go on when a rank is killed.

    python benchmarks/healing.py cost                     # about four minutes
    python benchmarks/healing.py cost --models cnn --seconds 20
    python benchmarks/healing.py recovery                 # about four minutes

"cost" trains with two averagers in one job of two ranks, in turns: one goes on after a loss, the other does not. A pair
is a step of each, and its difference that of the slower ranks' times. The median of the differences is shown with its
95 % interval: of the time that passed, and of the processor time of a rank's threads, on which other programs of the
machine have less influence.

"recovery" kills ranks with SIGKILL at random moments of a training. It measures from the signal to the end of the first
step that the slowest of the others finishes without the dead rank. A step itself takes a few milliseconds.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks of "recovery" are forked
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from measure import save
from torch import nn
from training_step import MODELS, step

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.torch import DistributedOptimizer, GradientAverager, broadcast_parameters


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    """0.8 MB of parameters: a step takes less than a millisecond."""
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.randn(32, 256)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "small perceptron": perceptron,
    "cnn": MODELS["cnn"],
    "transformer": MODELS["transformer"],
    "mlp, batch 64": MODELS["mlp, batch 64"],
}
#: Steps before the first pair, in which "end" decides whether to overlap.
WARM_UP = 110


# What it costs ------------------------------------------------------------------------------------


def training(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], goes_on: bool, copies: bool = False
) -> Callable[[], None]:
    """A step of a training that goes on after a loss, or not; both in a job that would.

    Args:
        make: the model, and a batch of its inputs.
        goes_on: after a loss.
        copies: whether each step also copies the gradients once, for nothing.
    """
    torch.manual_seed(0)
    model, x = make()
    y = torch.randint(0, 10, (x.shape[0],))
    world = current()
    world.recovers = goes_on
    averager = GradientAverager(model, communicator=world.new_communicator("continue" if goes_on else "end"))
    world.recovers = True
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    averager.compare_options(lambda: optimizer.param_groups)
    optimizer.averager = averager  # type: ignore[attr-defined]  # which must outlive this function
    gradients = [parameter for parameter in model.parameters() if copies]
    copied = [torch.zeros_like(parameter) for parameter in gradients]

    def copy() -> None:
        for to, parameter in zip(copied, gradients, strict=True):
            to.copy_(parameter.grad)

    return step(model, optimizer, x, y, copy)


def turns(ways: Sequence[Callable[[], None]], number: int) -> np.ndarray:
    """Seconds of the slowest rank for a step of each way, by turn: those that passed, and those of its threads."""
    seconds = np.zeros((number, len(ways), 2))
    gc.collect()
    gc.disable()
    for i in range(number):
        for place in range(len(ways)) if i % 2 else reversed(range(len(ways))):
            ring.barrier()
            started, used = time.perf_counter(), time.process_time()
            ways[place]()
            seconds[i, place] = time.perf_counter() - started, time.process_time() - used
    gc.enable()
    return np.asarray(ring.all_reduce(seconds, ring.MAX))


def median_of(values: np.ndarray) -> tuple[float, float, float]:
    """The median with its 95 % interval, from order statistics."""
    ordered = np.sort(values)
    half = 0.98 * len(ordered) ** 0.5
    low, high = int(max(0, len(ordered) / 2 - half)), int(min(len(ordered) - 1, len(ordered) / 2 + half))
    return float(np.median(ordered)), float(ordered[low]), float(ordered[high])


def cost(options: argparse.Namespace) -> None:
    ring.init(ranks=2, on_failure="continue")
    rows: dict[str, dict[str, Any]] = {}
    for name in (name for name in NETWORKS if any(part in name for part in options.models or [""])):
        end, goes_on = (training(NETWORKS[name], after) for after in (False, True))
        for i in range(WARM_UP):
            end()
            if i < 5:
                goes_on()
        probe = float(turns([end, goes_on], 5)[:, :, 0].sum(axis=1).mean())
        found = turns([end, goes_on], max(40, int(options.seconds / probe)))
        row: dict[str, Any] = {"pairs": len(found), "load": os.getloadavg()[0]}
        for kind, what in enumerate(("time", "processor")):
            more, low, high = median_of(found[:, 1, kind] - found[:, 0, kind])
            took = float(np.median(found[:, 0, kind]))
            row[what] = {"end": took, "more": more, "low": low, "high": high}
            if ring.rank() == 0:
                print(
                    f"{name}, {what}: end {took * 1e3:.3f} ms, continue {more * 1e6:+.1f} us ({low * 1e6:+.1f} to "
                    f"{high * 1e6:+.1f}), {more / took:+.2%}, {len(found)} pairs, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
        rows[name] = row
    if ring.rank() == 0 and not options.models:
        save("healing_cost", {"ranks": ring.size(), "seconds": rows})
    ring.barrier()


# How soon the others go on ------------------------------------------------------------------------


def mortal_training(seed: int, ranks: int, deaths: int) -> Callable[[int], Any]:
    """A function for a rank: it trains, and kills itself at random moments; returns when each of its steps ended."""

    def train(rank: int) -> list[list[float]]:
        ring.init(on_failure="continue")
        torch.manual_seed(0)
        model, x = perceptron()
        y = torch.randint(0, 10, (x.shape[0],))
        broadcast_parameters(model)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model.named_parameters())
        run, ended = step(model, optimizer, x, y), []  # type: ignore[arg-type]
        drawn = random.Random(seed)
        victims = drawn.sample(range(ranks), deaths)
        moments = {victim: (30 * (place + 1), drawn.random()) for place, victim in enumerate(victims)}
        typical = 0.0
        for number in range(30 * (deaths + 1)):
            began = time.monotonic()
            if number == moments.get(rank, (-1, 0))[0]:
                signal.signal(signal.SIGALRM, _die)
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, typical * moments[rank][1]))
            run()
            typical = 0.8 * typical + 0.2 * (time.monotonic() - began)
            ended.append([time.monotonic(), float(ring.size())])
        return ended

    return train


def _die(*_: object) -> None:
    with open(os.environ["DEATHS"], "a") as file:
        file.write(f"{time.monotonic()}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def recovery(options: argparse.Namespace) -> None:
    from tests.forked_ranks import run_forked

    torch.set_num_threads(1)
    rows: dict[str, dict[str, float]] = {}
    deaths_file = Path(f"/tmp/deaths-{os.getpid()}")
    for ranks in (2, 4, 8):
        seconds: list[float] = []
        seed = 0
        while len(seconds) < options.deaths:
            seed += 1
            deaths_file.write_text("")
            per_job = min(ranks - 1, 3, options.deaths - len(seconds))
            job = run_forked(ranks, mortal_training(seed, ranks, per_job), 60, {"DEATHS": str(deaths_file)})
            moments = sorted(map(float, deaths_file.read_text().split()))
            if len(job.found) != ranks - per_job or len(moments) != per_job:
                raise SystemExit(f"a job of {ranks} ranks ended otherwise: {job}")
            for place, moment in enumerate(moments):
                size = ranks - 1 - place
                # The first step that each of the others ended after the death, with the ranks that are left.
                first = [next(at for at, left in steps if at > moment and left <= size) for steps in job.found.values()]
                seconds.append(max(first) - moment)
        found = np.array(seconds)
        rows[str(ranks)] = {
            "deaths": len(found),
            "median": float(np.median(found)),
            "p95": float(np.percentile(found, 95)),
            "worst": float(found.max()),
        }
        print(
            f"{ranks} ranks: median {np.median(found) * 1e3:.0f} ms, worst {found.max() * 1e3:.0f} ms, "
            f"{len(found)} deaths, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    deaths_file.unlink()
    if options.deaths >= 100:
        save("healing_recovery", {"seconds": rows, "load": os.getloadavg()[0]}, "2, 4 and 8 ranks on 1 host")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "recovery"])
    parser.add_argument("--models", nargs="+", help="cost: parts of their names; the result is not kept then")
    parser.add_argument("--seconds", type=float, default=45.0, help="cost: approximate time for each model")
    parser.add_argument("--deaths", type=int, default=100, help="recovery: for each number of ranks")
    options = parser.parse_args()
    {"cost": cost, "recovery": recovery}[options.what](options)


if __name__ == "__main__":
    main()
