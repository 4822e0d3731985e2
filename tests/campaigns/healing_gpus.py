"""Random kills in jobs on simulated GPUs: `python -m tests.campaigns.healing_gpus --jobs 50 --seed 1`.

A job has 2 to 4 ranks on one host, or on several virtual ones. Up to all but one kill themselves at places of a step
that were drawn, also in the same step; streams lag, NCCL reports dead peers or does not, and has `ncclCommShrink` or
not. It is good if those left end with the weights of a replay in one process, bit for bit
(tests/gpu_rehearsal/programs/heals.py). A job is drawn from seed and number alone, so `--first 17 --jobs 1` runs job 17
again. Ranks are forked from this process, which imports torch's CUDA build once.
"""

import argparse
import ctypes
import importlib
import os
import random
import runpy
import sys
import time
from collections import Counter
from typing import Any

from tests import worker
from tests.forked_ranks import Ended, run_forked
from tests.gpu_rehearsal.build import REPOSITORY, build

PROGRAM = REPOSITORY / "tests" / "gpu_rehearsal" / "programs" / "heals.py"
POINTS, STEPS = ("forward", "first", "backward", "end", "after", "update"), 6
NODES = {2: "1,1", 3: "1,2", 4: "2,2"}


def draw(seed: int, number: int) -> tuple[int, str, list[str], dict[str, str]]:
    """Ranks, virtual hosts, faults as heals.py takes them, and settings of the simulation."""
    chance = random.Random(f"{seed} {number}")
    ranks = chance.randint(2, 4)
    steps = [chance.randrange(STEPS) for _ in range(2)]
    dying = chance.sample(range(ranks), chance.randint(1, ranks - 1))
    faults = [f"{rank}:{chance.choice(POINTS)}:{chance.choice(steps)}" for rank in dying]
    settings = {"LAG": chance.choice(("0", "300")), "PEER_ERRORS": chance.choice("01")}
    settings["NCCL"] = chance.choice(("22907", "22907", "22203"))
    nodes = chance.choice(("", "", NODES[ranks]))
    return ranks, nodes, faults, {f"RING_SIMULATED_{name}": value for name, value in settings.items()}


def in_last_average(ranks: int, nodes: str, faults: list[str]) -> list[int]:
    """The ranks whose gradients are in the last average: who dies once it is over, on several hosts confirmed, too."""
    late = [f":{point}:{STEPS - 1}" for point in ("update", *([] if nodes else ["after"]))]
    lost = {int(fault[0]) for fault in faults if fault[1:] not in late}
    return [rank for rank in range(ranks) if rank not in lost]


def run(ranks: int, nodes: str, faults: list[str], settings: dict[str, str]) -> Ended:
    """Run heals.py on forked ranks, which return what it reports."""

    def be_one(rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        ctypes.CDLL("libsimulated_devices.so").simulated_reset()
        worker.report, sys.argv = found.__setitem__, [str(PROGRAM), *faults]
        runpy.run_path(str(PROGRAM))
        return found

    return run_forked(ranks, be_one, 200, {**settings, "TEST_RANKS": str(ranks)}, nodes=nodes)


def problem(ended: Ended, ranks: int, nodes: str, faults: list[str]) -> str:
    """What is wrong with how a job ended, "" if nothing is."""
    survivors = [rank for rank in range(ranks) if rank not in {int(fault[0]) for fault in faults}]
    equal = {"last": in_last_average(ranks, nodes, faults), "steps": STEPS, "unlike rank 0": 0, "unlike the replay": 0}
    wrong = {
        (rank, key): (ended.found.get(rank) or {}).get(key)
        for rank in survivors
        for key, value in equal.items()
        if (ended.found.get(rank) or {}).get(key) != value
    }
    return f"{wrong} {ended.codes} {ended.left}\n{ended.output}" if wrong or ended.left else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no job after so many")
    options = parser.parse_args()
    if "RING_SIMULATED_DEVICES" not in os.environ:  # the loader reads these variables once
        variables = {**os.environ, **build(), "RING_SIMULATED_DEVICES": "4", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.campaigns.healing_gpus", *sys.argv[1:]], variables)
    for module in ("torch._dynamo", "ring_plugins.torch"):  # here, not in every rank; an optimizer imports the first
        importlib.import_module(module)

    found, kills, end = Counter[str](), 0, time.monotonic() + options.minutes * 60
    for number in range(options.first, options.first + options.jobs):
        if time.monotonic() > end:
            break
        ranks, nodes, faults, settings = draw(options.seed, number)
        ended = run(ranks, nodes, faults, settings)
        why = problem(ended, ranks, nodes, faults)
        found["wrong" if why else "went on"] += 1
        kills += len(faults)
        what = [ranks, nodes or "one host", *faults, *settings.values()]
        print(number, *what, f"{ended.seconds:.1f} s", why or "went on", flush=True)
    print(f"{sum(found.values())} jobs, {kills} kills: {dict(found)}")


if __name__ == "__main__":
    main()
