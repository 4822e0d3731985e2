"""Training steps of two ranks that a script spawns itself, with nothing exported, as a newcomer starts it.

    python benchmarks/default_threads.py                     # PyTorch and Keras on its three backends; a few minutes
    python benchmarks/default_threads.py torch keras-jax     # some of them

Each variant is a job of its own, and the variants of a plugin take turns. "every core in each rank" is what the
libraries do by default, exported as numbers; "nothing set" leaves the number of threads to `ring_plugins.init`; "share
exported" exports each rank's share of the cores, as `ring run` and torchrun do for PyTorch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import ClassVar

VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "PJRT_NPROC")
PLUGINS = ("torch", "keras-torch", "keras-tensorflow", "keras-jax")
RANKS, STEPS, WARM_UP, WIDTH, BATCH = 2, 30, 5, 1024, 64


def torch_steps() -> list[float]:
    """Seconds of each step of a perceptron in PyTorch."""
    import torch
    from torch import nn

    import ring_plugins as ring
    from ring_plugins.torch import DistributedOptimizer

    ring.init(ranks=RANKS)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model.named_parameters())
    x = torch.randn(BATCH, WIDTH)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def keras_steps() -> list[float]:
    """Seconds of each step of the same perceptron in Keras."""
    import keras
    import numpy as np

    import ring_plugins as ring
    from ring_plugins.keras import BroadcastCallback, DistributedOptimizer

    class Clock(keras.callbacks.Callback):
        seconds: ClassVar[list[float]] = []

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    ring.init(ranks=RANKS)
    model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, "relu") for _ in range(4))])
    model.compile(DistributedOptimizer(keras.optimizers.SGD(1e-3)), "mse")
    x = np.random.default_rng(0).normal(size=(BATCH * (WARM_UP + STEPS), WIDTH)).astype("float32")
    clock = Clock()
    model.fit(x, x, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[BroadcastCallback(), clock])
    return clock.seconds[WARM_UP:]


def job(plugin: str, threads: int | None) -> float:
    """Run a job; returns the median milliseconds of its steps on rank 0.

    Args:
        plugin: one of `PLUGINS`.
        threads: number to export for each library, None for nothing.
    """
    environment = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "XLA_FLAGS")}
    environment |= {"KERAS_BACKEND": plugin.rpartition("-")[2], "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment |= {name: str(threads) for name in VARIABLES if threads}
    line = [sys.executable, __file__, "--steps", plugin]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{plugin} with threads={threads}:\n{done.stderr}")
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plugins", nargs="*", choices=[[], *PLUGINS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", choices=PLUGINS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps:
        seconds = torch_steps() if options.steps == "torch" else keras_steps()
        import ring_plugins as ring

        if ring.rank() == 0:
            print(statistics.median(seconds) * 1e3)
        return
    cores = len(os.sched_getaffinity(0))
    variants = {"every core in each rank": cores, "nothing set": None, "share exported": max(1, cores // RANKS)}
    for plugin in options.plugins or PLUGINS:
        found: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(options.rounds):
            for name, threads in variants.items():
                found[name].append(job(plugin, threads))
        medians = {name: statistics.median(times) for name, times in found.items()}
        text = ", ".join(f"{name} {medians[name]:.1f} ms ({min(t):.1f} to {max(t):.1f})" for name, t in found.items())
        ratio = medians["every core in each rank"] / medians["nothing set"]
        print(f"{plugin}: {text}; every core / nothing set = {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
