"""All-reduce of 25 MiB of gradients between hosts with each codec, in milliseconds, on slow and fast networks.

And training steps of a perceptron with 10 MiB of weights with each way that "auto" tries, and with what it has chosen.

    python benchmarks/compression.py                          # 100 Mbit/s, 1 and 10 Gbit/s on two test hosts, as root
    python benchmarks/compression.py --hosts 4 --rate 1gbit   # one network, printed only
    mpirun -n 2 --hostfile hosts python benchmarks/compression.py --here  # on real hosts

Test hosts are network namespaces with shaped links (tests/hosts), one rank each. All codecs take turns in one run, with
error feedback, as `DistributedOptimizer` uses them. Gradients are normal numbers of size 1e-3, and of 1e-5, which
16-bit floats hold as subnormal numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import init_under_mpirun, machine, on_test_hosts, save, used_by_others
from torch import nn

import ring_plugins as ring
from ring_plugins.benchmarking import Times, interleaved
from ring_plugins.core.arrays.codec import AUTO, CODECS, Compression
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.world import current
from ring_plugins.torch import GradientAverager

BYTES = 25 << 20
WIDTH = 512
kept: list[GradientAverager] = []
RATES = ["100mbit", "1gbit", "10gbit"]
SIZES = [1e-3, 1e-5]
RANKS = "one rank of one thread per test host, which share these cores"


def variants() -> dict[str, Callable[[], None]]:
    """By name, a function that reduces gradients with a codec."""
    found: dict[str, Callable[[], None]] = {}
    for size in SIZES:
        gradients = np.random.default_rng(ring.rank()).normal(size=BYTES // 4).astype(np.float32) * np.float32(size)
        for name in [None, *CODECS]:
            codec = None if name is None else Compression(name, True).codec()
            array = np.empty_like(gradients)

            def reduce(codec=codec, array=array, gradients=gradients) -> None:
                np.copyto(array, gradients)  # a few milliseconds
                if codec is not None:
                    codec.begin(array)
                current().communicator.all_reduce(HostMemory(array, "float32"), Op.AVERAGE, codec)

            found[f"{name or 'none'}, {size:g}"] = reduce
    return found


def steps() -> tuple[dict[str, Callable[[], None]], str]:
    """By name, a function that makes training steps; and what "auto" has chosen."""
    found: dict[str, Callable[[], None]] = {}
    chosen = ""
    for name in [None, "bf16", "int8", AUTO]:
        torch.manual_seed(0)
        layers = [[nn.Linear(WIDTH, WIDTH), nn.ReLU()] for _ in range(10)]
        model = nn.Sequential(*itertools.chain(*layers))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        averager = GradientAverager(model, compression=name)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            model(torch.randn(16, WIDTH)).square().mean().backward()
            optimizer.step()

        choices = averager._sets.compression, averager._sets.overlap
        while not all(choice.finished for choice in choices):
            step()
        if name == AUTO:
            chosen = str(choices[0].now)
        kept.append(averager)  # without a reference it would stop averaging
        found[f"step, {name or 'none'}"] = step
    return found, chosen


def worker(options: argparse.Namespace) -> None:
    """Measure among the ranks that mpirun has started."""
    init_under_mpirun(options.address)
    torch.set_num_threads(1)
    made, (trained, chosen) = variants(), steps()
    made |= trained
    interleaved(made, 1, 1)
    times: dict[str, Times] = interleaved(made, options.repetitions, 1)
    shared = used_by_others(float(ring.all_reduce(time.process_time(), ring.SUM)))
    if ring.rank() == 0:
        seconds = {name: vars(one) for name, one in times.items()}
        record = {"hosts": ring.num_nodes(), "ranks": ring.size(), "shared": shared, "seconds": seconds, "auto": chosen}
        if options.out:
            Path(options.out).write_text(json.dumps(record))
        for name, one in times.items():
            print(f"{name}: {one.median * 1e3:.0f} ms")
    ring.barrier()


def report(record: dict[str, object]) -> None:
    seconds: dict[str, dict[str, float]] = record["seconds"]  # type: ignore[assignment]
    print(f"{record['hosts']} hosts at {record['rate']}, 25 MiB, median ms")
    for size in SIZES:
        plain = seconds[f"none, {size:g}"]["median"]
        row = [
            f"{name} {(t := seconds[f'{name}, {size:g}']['median']) * 1e3:,.0f} ({plain / t:.2f}x)" for name in CODECS
        ]
        print(f"  numbers of size {size:g}: none {plain * 1e3:,.0f}, {', '.join(row)}")
    ways = [f"{name[6:]} {one['median'] * 1e3:,.0f}" for name, one in seconds.items() if name.startswith("step, ")]
    print(f"  steps: {', '.join(ways)}; auto chose {record['auto']}")
    print(machine(RANKS, float(str(record["shared"]))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="number of test hosts")
    parser.add_argument("--rate", action="append", help="rate of each link: 100mbit, 1gbit, none; may be repeated")
    parser.add_argument("--repetitions", type=int, default=7, help="turns of each codec")
    parser.add_argument("--here", action="store_true", help="measure among the ranks that mpirun started")
    parser.add_argument("--address", help="address of rank 0's host, with --here")
    parser.add_argument("--out", help="file for the result, with --here")
    options = parser.parse_args()
    if options.here:
        worker(options)
        return
    records = []
    for rate in options.rate or RATES:
        limit = None if rate == "none" else rate
        found = on_test_hosts(__file__, options.hosts, limit, ["--repetitions", str(options.repetitions)], ranks=1)
        records.append({**json.loads(found), "rate": rate})
        report(records[-1])
    if not options.rate and options.hosts == 2:
        save("compression", {"networks": records}, RANKS, max(float(str(one["shared"])) for one in records))


if __name__ == "__main__":
    main()
