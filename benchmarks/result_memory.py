"""Page faults and processor time of `ring.all_reduce(x)` on two ranks, with and without `out=x`.

    python benchmarks/result_memory.py            # about half a minute

Results of a call are dropped when the next one has returned, as in a loop. Figures are of rank 0, per call, medians.
"""

from __future__ import annotations

import resource
import statistics
import time

import numpy as np
import torch
from measure import machine

import ring_plugins as ring

SIZES = (1 << 20, 25 << 20, 64 << 20, 100 << 20)
CALLS = 12


def main() -> None:
    ring.init(ranks=2)
    if ring.rank() == 0:
        print("      bytes  library  memory      page faults   processor ms")
    for size in SIZES:
        for library, x in {"numpy": np.zeros(size // 4, np.float32), "torch": torch.zeros(size // 4)}.items():
            for memory, out in {"of the call": None, "out=x": x}.items():
                faults, seconds = measure(x, out)
                if ring.rank() == 0:
                    print(f"{size:>11,}  {library:7}  {memory:11} {faults:>11,.0f} {seconds * 1e3:>14.2f}")
    if ring.rank() == 0:
        print(machine())


def measure(x: object, out: object) -> tuple[float, float]:
    """Page faults and processor seconds of a call."""
    faults, seconds = [], []
    for _ in range(CALLS):
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.thread_time()
        result = ring.all_reduce(x, out=out)
        seconds.append(time.thread_time() - began)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del result
    return statistics.median(faults[2:]), statistics.median(seconds[2:])


if __name__ == "__main__":
    main()
