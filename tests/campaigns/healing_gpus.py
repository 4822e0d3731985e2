"""Random kills in jobs on simulated GPUs: `python -m tests.campaigns.healing_gpus --jobs 50 --seed 1`.

A job has 2 to 4 ranks on one host, or on several virtual ones. Up to all but one kill themselves at places of a step
that were drawn, also in the same step; streams lag, NCCL reports dead peers or does not, and has `ncclCommShrink` or
not. Some jobs are loops that go on with those left, in some processes take the places of the killed ranks, and some are
fits of Lightning's Trainer. A loop is good if all members end with the weights of a replay in one process, bit for bit
(tests/gpu_rehearsal/programs/heals.py). A fit is good if those left end it on their GPUs with equal weights, and then
another one (lightning_heals.py). A job is drawn from seed and number alone, so `--first 17 --jobs 1` runs job 17 again.
Ranks are forked from this process, which imports torch's CUDA build once.
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
from typing import Any, NamedTuple

from tests import worker
from tests.campaigns.replacing import run_replaced
from tests.forked_ranks import Ended, run_forked
from tests.gpu_rehearsal.build import REPOSITORY, build

PROGRAMS = REPOSITORY / "tests" / "gpu_rehearsal" / "programs"
POINTS, STEPS = ("forward", "first", "backward", "end", "after", "update"), 6
NODES = {2: "1,1", 3: "1,2", 4: "2,2"}
KINDS = ("continue", "continue", "replace", "replace", "Lightning")
SECONDS = 300.0


class Job(NamedTuple):
    """What is run.

    Attributes:
        kind: one of KINDS.
        ranks: how many.
        nodes: virtual hosts, as RING_VIRTUAL_NODES; "" for one host.
        faults: as deaths.py takes them.
        settings: environment variables of the simulation.
    """

    kind: str
    ranks: int
    nodes: str
    faults: list[str]
    settings: dict[str, str]

    @property
    def survivors(self) -> list[int]:
        """The ranks that are not killed."""
        return [rank for rank in range(self.ranks) if rank not in {int(fault[0]) for fault in self.faults}]


def draw(seed: int, number: int) -> Job:
    chance = random.Random(f"{seed} {number}")
    ranks, kind = chance.randint(2, 4), chance.choice(KINDS)
    # Where places are to be taken, all notice a loss before the last step.
    steps = [chance.randrange(STEPS - 2 if kind == "replace" else STEPS) for _ in range(2)]
    dying = chance.sample(range(ranks), chance.randint(1, ranks - 1))
    faults = [f"{rank}:{chance.choice(POINTS)}:{chance.choice(steps)}" for rank in dying]
    settings = {"LAG": chance.choice(("0", "300")), "PEER_ERRORS": chance.choice("01")}
    settings["NCCL"] = chance.choice(("22907", "22907", "22203"))
    nodes = chance.choice(("", "", NODES[ranks])) if kind == "continue" else ""
    variables = {f"RING_SIMULATED_{name}": value for name, value in settings.items()}
    return Job(kind, ranks, nodes, faults, {**variables, "TEST_ON_FAILURE": kind})


def in_last_average(job: Job) -> list[int]:
    """The ranks whose gradients are in the last average: who dies once it is over, on several hosts confirmed, too."""
    late = [f":{point}:{STEPS - 1}" for point in ("update", *([] if job.nodes else ["after"]))]
    lost = {int(fault[0]) for fault in job.faults if fault[1:] not in late}
    return [rank for rank in range(job.ranks) if rank not in lost]


def run(job: Job) -> Ended:
    """Run the program on forked ranks, which return what it reports."""
    program = PROGRAMS / f"{'lightning_heals' if job.kind == 'Lightning' else 'heals'}.py"

    def be_one(_: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        os.environ.update(job.settings, TEST_RANKS=str(job.ranks))
        ctypes.CDLL("libsimulated_devices.so").simulated_reset()
        worker.report, sys.argv = found.__setitem__, [str(program), *job.faults]
        runpy.run_path(str(program))
        return found

    if job.kind == "replace":
        return run_replaced(job.ranks, 0, be_one, SECONDS)
    return run_forked(job.ranks, be_one, SECONDS, nodes=job.nodes)


def problem(ended: Ended, job: Job) -> str:
    """What is wrong with how a job ended, "" if nothing is."""
    if job.kind == "replace":
        equal: dict[str, Any] = {"size": job.ranks, "last": [*range(job.ranks)]}
        members = sorted(ended.found)
        wrong: dict[Any, Any] = {} if len(members) == job.ranks else {"members": members}
    else:
        members, wrong = job.survivors, {}
        equal = {"last": in_last_average(job), "steps": STEPS}
    equal |= {"unlike rank 0": 0, "unlike the replay": 0}
    if job.kind == "Lightning":
        equal = {"size": len(members), "finite": True, "unlike rank 0": 0, "then unlike rank 0": 0}
    for rank in members:
        found = ended.found.get(rank) or {}
        if job.kind == "Lightning":
            equal["device"] = f"cuda:{rank}"
        wrong |= {(rank, key): found.get(key) for key, value in equal.items() if found.get(key) != value}
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
    # Here, not in every rank; an optimizer imports the first.
    for module in ("torch._dynamo", "ring_plugins.torch", "ring_plugins.lightning", "lightning"):
        importlib.import_module(module)

    found, kills, end = Counter[str](), 0, time.monotonic() + options.minutes * 60
    for number in range(options.first, options.first + options.jobs):
        if time.monotonic() > end:
            break
        job = draw(options.seed, number)
        ended = run(job)
        why = problem(ended, job)
        found[f"{job.kind} {'wrong' if why else 'went on'}"] += 1
        kills += len(job.faults)
        what = [job.kind, job.ranks, job.nodes or "one host", *job.faults, *job.settings.values()]
        print(number, *what, f"{ended.seconds:.1f} s", why or "went on", flush=True)
    print(f"{sum(found.values())} jobs, {kills} kills: {dict(found)}")


if __name__ == "__main__":
    main()
