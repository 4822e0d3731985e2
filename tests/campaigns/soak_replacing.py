"""Ranks die for a long time and other processes take their places: those that stay hold on to nothing.

    python -m tests.campaigns.soak_replacing --seconds 600 --ranks 3 --kept 0

The first process of one slot stays. All others kill themselves some time after they have joined. Measured are
memory, threads, files and mappings: in the one that stays, each time that all are there, and in the process that does
what `ring run` does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # the ranks are forked

import torch

import ring_plugins as ring
from ring_plugins.launcher import replacements
from ring_plugins.torch import DistributedOptimizer, TrainingState, broadcast_parameters
from tests.campaigns.replacing import run_replaced
from tests.campaigns.soak import growth, problems
from tests.campaigns.soak_worker import held
from tests.mortal import die

#: Elements of the parameters: some share a bucket, and large gradients are averaged where they are.
COUNTS = (10, 20_000, 300_000)
#: Seconds for which a process lives after it has joined, at the most; and in which nobody dies at the end.
LIFE, CALM = 1.0, 10.0


def train(kept: int, until: float, process: int) -> dict[str, Any]:
    """Train until a time; returns what this process has held each time that all slots were taken again."""
    ring.init(on_failure="replace")
    slot, slots = ring.rank(), ring.size()
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(count)) for count in COUNTS])
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    measured: list[dict[str, float]] = []

    def measure(change: ring.MembershipChange) -> None:
        if change.joined and change.size == slots and process == kept:
            measured.append({"joins": len(measured) + 1, **held()})

    ring.on_membership_change(measure)
    state = TrainingState(model=model, optimizer=optimizer, step=0)
    life = random.Random(process).random() * LIFE
    if process != kept and time.time() + life < until - CALM:
        threading.Timer(life, die).start()
    over = False
    while not over:
        optimizer.zero_grad()
        (sum(parameter.sum() for parameter in model) * (slot + 1)).backward()  # type: ignore[union-attr]
        optimizer.step()
        state.step += 1
        over = all(ring.all_gather_object(time.time() > until))
        state.commit()
    digests = ring.all_gather_object([float(parameter.detach().sum()) for parameter in model])
    assert digests == digests[:1] * slots, digests
    return {"slot": slot, "steps": state.step, "held": measured}


def run(seconds: float, ranks: int, standbys: int, kept: int) -> tuple[dict[str, Any], list[str]]:
    """Run a job; returns what the process that stays and the launcher's have held, and what is wrong."""
    replacements.MOST = 10**6  # a real job gives up a slot that is lost too often
    until, here = time.time() + seconds, list[dict[str, float]]()

    def measure() -> None:
        if time.time() > until - seconds + len(here) * seconds / 20:
            here.append(held())

    ended = run_replaced(ranks, standbys, lambda process: train(kept, until, process), seconds + 120, meanwhile=measure)
    finished = sorted(one["slot"] for one in ended.found.values())
    there = ended.found.get(kept, {"held": []})
    wrong = [] if finished == list(range(ranks)) else [f"only slots {finished} have finished: {ended.codes}"]
    wrong += [f"left behind: {one}" for one in ended.left]
    for who, measured in (("the process that stays", there["held"]), ("the launcher", here)):
        wrong += [f"{who}: {problem}" for problem in (problems(growth(measured)) if measured else ["no join"])]
    return {"steps": there.get("steps"), "rank": there["held"], "launcher": here, "output": ended.output}, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--standbys", type=int, default=1)
    parser.add_argument("--kept", type=int, default=0, help="the rank that does not die")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, wrong = run(options.seconds, options.ranks, options.standbys, options.kept)
    print(f"{options.ranks} ranks, rank {options.kept} stays: {len(found['rank'])} joins, {found['steps']} steps")
    for who in ("rank", "launcher"):
        measured = found[who]
        if measured:
            print(f"{who}: first {json.dumps(measured[0])}, last {json.dumps(measured[-1])}, grown {growth(measured)}")
    if wrong:
        print(found["output"][-20_000:], *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
