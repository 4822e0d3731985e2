"""A random mix of everything public for a long time: results are right, and memory, threads, files, mappings stay flat.

python -m tests.campaigns.soak --seconds 3600 --ranks 2 4 --launcher mpirun
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("PYTEST_XDIST_WORKER", "campaign")

from tests.launch import Result, run_ranks
from tests.launchers import LAUNCHERS

WORKER = Path(__file__).with_name("soak_worker.py")
#: How much more than in its first quarter a rank may hold at the end. Allocators keep some MiB of what they had.
MEMORY_MIB, MAPPINGS = 32.0, 60


def run(seconds: float, ranks: int, launcher: str, seed: int) -> Result:
    env = {"TEST_SPAWN": "1"} if launcher == "spawned" else {}
    return run_ranks(WORKER, ranks, launcher, [str(seconds), str(seed)], env, timeout=seconds * 1.5 + 300)  # type: ignore[arg-type]


def growth(measured: list[dict[str, float]]) -> dict[str, float]:
    """For each thing held, the median of the last quarter less the greatest of the first quarter (of all that was)."""
    quarter = max(len(measured) // 4, 1)

    def late(key: str) -> float:
        return sorted(line[key] for line in measured[-quarter:])[quarter // 2]

    keys = ("memory", "threads", "files", "mappings")
    return {key: round(late(key) - max(line[key] for line in measured[:quarter]), 1) for key in keys}


def problems(grown: dict[str, float]) -> list[str]:
    """What grew by more than it may."""
    allowed = {"memory": MEMORY_MIB, "threads": 0, "files": 0, "mappings": MAPPINGS}
    return [f"{key} grew by {grown[key]:g}" for key, limit in allowed.items() if grown[key] > limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--launcher", choices=LAUNCHERS, default="mpirun")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    failed = False
    for ranks in arguments.ranks:
        result = run(arguments.seconds, ranks, arguments.launcher, arguments.seed)
        print(f"{ranks} ranks, {arguments.launcher}: {sum(result.values('counts')[0].values())} actions")
        print(json.dumps(result.values("counts")[0]))
        for rank, measured in enumerate(result.values("held")):
            grown = growth(measured)
            found = problems(grown)
            failed |= bool(found)
            print(f"rank {rank}: first {measured[0]}, last {measured[-1]}, grown {grown} {found or ''}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
