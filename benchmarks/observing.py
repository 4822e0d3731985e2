"""The cost of observability while it is not used.

    python benchmarks/observing.py            # half a minute

Two ranks take steps of about 10 ms with five buckets. Three figures, as shares of such a step:

* the processor time of the monitor thread, which drives the control channel;
* the statements that observability adds to the script's and the communication thread: their time in a loop, multiplied
  by their number per step;
* recording a timeline: medians of steps with and without, in turn.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
import timeit

import numpy as np

STEP = 0.01


def added_statements(operations: int) -> float:
    """Seconds per step of the statements in `SerialExecutor.run` that reports need, and those at the end of a pass."""
    from ring_plugins.core.control.wait import Wait
    from ring_plugins.core.trace.recorder import recorder
    from ring_plugins.core.trace.steps import StepClock

    clock, wait, number = StepClock(), Wait("benchmark", None), 20_000

    class Work:
        description = "bucket 0 of 5"

    work = Work()

    def operation() -> None:
        wait.part_of = work.description if work is not None and work.description != "all_reduce" else ""
        wait.number = 3
        before = wait.waited_for_arrival
        wait.operation = "all_reduce"  # type: ignore[attr-defined]  # as costly as the communicator's
        wait.began = time.monotonic()  # type: ignore[attr-defined]
        clock.add_blocked_time(0.0, wait.waited_for_arrival - before)
        if recorder.on:
            raise AssertionError

    def step() -> None:
        clock.ended.append((time.monotonic(), clock.count, clock.waiting, clock.moving, clock.gpu_wait, 1))
        clock.count += 1

    each = min(timeit.repeat(operation, number=number, repeat=5)) / number
    return operations * each + min(timeit.repeat(step, number=number, repeat=5)) / number


def main() -> None:
    import torch

    import ring_plugins as ring
    from ring_plugins.core.trace.recorder import recorder
    from ring_plugins.torch import DistributedOptimizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    ring.init(ranks=2)
    torch.manual_seed(0)  # equal weights on all ranks
    model = torch.nn.Sequential(*(torch.nn.Linear(520, 520) for _ in range(5)))
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 1e-9), model.named_parameters(), bucket_bytes=1
    )
    data = torch.randn(64, 520)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - began

    monitor = next(thread for thread in threading.enumerate() if thread.name == "ring:monitor")
    assert monitor.ident is not None
    processor = time.pthread_getcpuclockid(monitor.ident)
    steps = int(options.seconds / 2 / STEP)
    for _ in range(110):  # in which ring_plugins decides whether to overlap
        step()
    began, used = time.perf_counter(), time.clock_gettime(processor)
    for _ in range(2 * steps):
        step()
    share = (time.clock_gettime(processor) - used) / (time.perf_counter() - began)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for i in range(steps):
        recorder.on = i % 2 == 1
        ring.barrier()
        seconds[recorder.on].append(step())
    recorder.on = False
    recorder.take()
    median = {on: float(np.median(values)) for on, values in seconds.items()}
    if ring.rank() == 0:
        statements = added_statements(operations=6)
        print(f"a step: {median[False] * 1e3:.2f} ms")
        print(f"monitor thread: {share:.3%} of the time")
        print(f"added statements: {statements * 1e6:.1f} µs per step, {statements / STEP:.3%} of 10 ms")
        print(f"together {share + statements / STEP:.3%} of a step of 10 ms")
        print(f"recording a timeline: {median[True] / median[False] - 1:+.1%} per step")
        print(os.uname().nodename, flush=True)


if __name__ == "__main__":
    main()
