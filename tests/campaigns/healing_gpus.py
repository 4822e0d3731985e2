"""Random kills in jobs on simulated GPUs: `python -m tests.campaigns.healing_gpus --jobs 50 --seed 1`.

A job has 2 to 4 ranks, of which up to all but one kill themselves at places of a step that were drawn, also in the same
step; streams lag, NCCL reports dead peers or does not, and has `ncclCommShrink` or not. It is good if those left end
with the weights of a replay in one process, bit for bit (tests/gpu_rehearsal/programs/heals.py). A job is drawn from
seed and number alone, so `--first 17 --jobs 1` runs job 17 again.
"""

import argparse
import os
import random
import time
from collections import Counter

from tests.gpu_rehearsal.build import REPOSITORY, build
from tests.launch import LaunchFailed, run_ranks

PROGRAM = REPOSITORY / "tests" / "gpu_rehearsal" / "programs" / "heals.py"
POINTS, STEPS = ("forward", "first", "backward", "end", "after", "update"), 6


def draw(seed: int, number: int) -> tuple[int, list[str], dict[str, str]]:
    """Ranks, faults as heals.py takes them, and settings of the simulation."""
    chance = random.Random(f"{seed} {number}")
    ranks = chance.randint(2, 4)
    steps = [chance.randrange(STEPS) for _ in range(2)]
    dying = chance.sample(range(ranks), chance.randint(1, ranks - 1))
    faults = [f"{rank}:{chance.choice(POINTS)}:{chance.choice(steps)}" for rank in dying]
    settings = {"LAG": chance.choice(("0", "300")), "PEER_ERRORS": chance.choice("01")}
    settings["NCCL"] = chance.choice(("22907", "22907", "22203"))
    return ranks, faults, {f"RING_SIMULATED_{name}": value for name, value in settings.items()}


def in_last_average(ranks: int, faults: list[str]) -> list[int]:
    """The ranks whose gradients are in the last average: who dies after it has taken part."""
    late = [f":{point}:{STEPS - 1}" for point in ("after", "update")]
    lost = {int(fault[0]) for fault in faults if fault[1:] not in late}
    return [rank for rank in range(ranks) if rank not in lost]


def problem(seed: int, number: int, variables: dict[str, str]) -> str:
    """What is wrong with how a job ended, "" if nothing is."""
    ranks, faults, settings = draw(seed, number)
    paths = os.pathsep.join([variables["PYTHONPATH"], str(REPOSITORY / "tests" / "python_path")])
    env = {**variables, **settings, "PYTHONPATH": paths, "RING_SIMULATED_DEVICES": str(ranks), "OMP_NUM_THREADS": "1"}
    try:
        result = run_ranks(PROGRAM, ranks, args=faults, env=env, timeout=200, check=False)
    except LaunchFailed as error:
        return f"{error}"
    survivors = ranks - len(faults)
    equal = {"last": in_last_average(ranks, faults), "steps": STEPS, "unlike rank 0": 0, "unlike the replay": 0}
    wrong = {key: found for key, value in equal.items() if (found := result.values(key)) != [value] * survivors}
    return f"{wrong}\n{result}" if wrong else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no job after so many")
    options = parser.parse_args()
    variables, found, kills, end = build(), Counter(), 0, time.monotonic() + options.minutes * 60
    for number in range(options.first, options.first + options.jobs):
        if time.monotonic() > end:
            break
        ranks, faults, settings = draw(options.seed, number)
        why = problem(options.seed, number, variables)
        found["wrong" if why else "went on"] += 1
        kills += len(faults)
        print(number, ranks, *faults, *settings.values(), why or "went on", flush=True)
    print(f"{sum(found.values())} jobs, {kills} kills: {dict(found)}")


if __name__ == "__main__":
    main()
