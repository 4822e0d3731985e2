"""Training steps of Keras on two ranks, beside the same steps without communication.

    mpirun -n 2 python benchmarks/keras_step.py                          # TensorFlow; about four minutes
    KERAS_BACKEND=torch mpirun -n 2 python benchmarks/keras_step.py      # or jax
    mpirun -n 2 python benchmarks/keras_step.py --network 0.5            # with a simulated network of 0.5 GB/s
    mpirun -n 2 python benchmarks/keras_step.py --sharded                # Adam, and its update divided among the ranks
    python benchmarks/keras_steps.py                                     # all of these but the last

"none" trains the ranks independently. "ours" averages like `BroadcastCallback`. "copied", for TensorFlow and JAX, is
ours with each all-reduce replaced by a copy of the gradients: with TensorFlow to the memory of their averages, which is
the minimum cost of averages outside TensorFlow's memory; with JAX, which reads averages where its gradients are, to
other memory and back. "fused", for TensorFlow, has the structure of a published Horovod script without
its negotiation: when all gradients are ready, one host call copies them into one buffer, MPI reduces it, and they are
copied out. "one bucket" is ours without overlap, for the simulated network, in which the reduction of a bucket sleeps
for the time that its bytes would need. "sharded" is ours with `shard_optimizer=True`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers
from measure import machine, save

import ring_plugins as ring
from ring_plugins.benchmarking import Times, interleaved
from ring_plugins.core.world import current
from ring_plugins.keras import DistributedOptimizer, broadcast_variables
from ring_plugins.keras.averaging import averaging_of

BACKEND = keras.backend.backend()
MODELS = ("convolutions", "mlp")
#: First steps, in which ring_plugins decides whether to overlap.
TRIAL = 110


def convolutions() -> tuple[Any, np.ndarray]:
    """59 variables, 27 MB; as in most such networks, the last layers' gradients are the largest and ready first."""
    stack = [keras.Input((8, 8, 64))]
    stack += [layers.Conv2D(64, 3, padding="same", activation="relu") for _ in range(9)]
    stack += [layers.Conv2D(128, 3, strides=2, padding="same", activation="relu")]
    stack += [layers.Conv2D(128, 3, padding="same", activation="relu") for _ in range(9)]
    stack += [layers.Conv2D(256, 3, padding="same", activation="relu") for _ in range(8)]
    stack += [
        layers.Flatten(),
        layers.Dense(144, activation="relu"),
        layers.Dense(10),
        layers.Dense(10, use_bias=False),
    ]
    return keras.Sequential(stack), np.random.default_rng(0).normal(size=(8, 8, 8, 64)).astype("float32")


def mlp() -> tuple[Any, np.ndarray]:
    """67 MB in few variables: many bytes for little computation."""
    stack = [keras.Input((2048,)), *(layers.Dense(2048, activation="relu") for _ in range(4)), layers.Dense(10)]
    return keras.Sequential(stack), np.random.default_rng(0).normal(size=(64, 2048)).astype("float32")


def step_of(kind: str, name: str, bandwidth: float, is_adam: bool) -> tuple[Callable[[], None], Any]:
    """Build and compile a model, and return a function that runs one training step, and its optimizer."""
    keras.utils.set_random_seed(0)
    model, x = (convolutions if name == "convolutions" else mlp)()
    optimizer = keras.optimizers.Adam(1e-4) if is_adam else keras.optimizers.SGD(1e-4, momentum=0.9)
    model.compile(
        optimizer=DistributedOptimizer(optimizer, shard_optimizer=True) if kind == "sharded" else optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    y = np.arange(len(x)) % 10
    model.optimizer.build(model.trainable_variables)
    if kind == "fused":
        fuse(model.optimizer)
    elif kind != "none":
        whole = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
        DistributedOptimizer(model.optimizer, **({"bucket_bytes": 2 * whole} if kind == "one bucket" else {}))
        averaging = averaging_of(model.optimizer)
        if kind == "one bucket":
            sizes = averaging.settings.sizes
            averaging.settings = averaging.settings._replace(
                sizes=sizes._replace(first_bucket_bytes=sizes.bucket_bytes)
            )
        averaging.prepare(model.trainable_variables)
        if kind == "copied":
            replace_reductions(averaging.exchange.communicator, Copy())
        if bandwidth:
            simulate_network(averaging.exchange.communicator, bandwidth)
    broadcast_variables(model)
    if BACKEND == "torch":
        import torch

        x, y = torch.from_numpy(x), torch.from_numpy(y)
    else:
        x, y = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
    return lambda: model.train_on_batch(x, y), model.optimizer


def simulate_network(communicator: Any, bandwidth: float) -> None:
    """Delay each reduction by the time that a network would take."""
    reduce = communicator.all_reduce

    def delayed(memory: Any, op: Any, codec: Any = None) -> None:
        time.sleep(memory.array.nbytes / bandwidth)
        reduce(memory, op, codec)

    replace_reductions(communicator, delayed)


def replace_reductions(communicator: Any, all_reduce: Callable[..., None]) -> None:
    """Have a communicator call this function for each memory that it is to reduce, alone or with others."""

    def coalesced(memories: Sequence[Any], op: Any, codecs: Any = None) -> None:
        for memory in memories:
            all_reduce(memory, op)

    communicator.all_reduce, communicator.all_reduce_coalesced = all_reduce, coalesced


class Copy:
    """Takes the place of an all-reduce, and only copies: to the memory of averages, or to its own memory and back."""

    def __init__(self) -> None:
        self._kept: dict[int, np.ndarray] = {}  # by bytes

    def __call__(self, memory: Any, op: Any, codec: Any = None) -> None:
        if memory.source is not None:
            np.copyto(memory.array, memory.source)
        elif BACKEND == "jax":
            if (kept := self._kept.get(memory.nbytes)) is None:
                kept = self._kept[memory.nbytes] = np.empty_like(memory.array)
            np.copyto(kept, memory.array)
            np.copyto(memory.array, kept)


def fuse(optimizer: Any) -> None:
    """Replace `apply` with one that reduces all gradients in one call."""
    import tensorflow as tf
    from mpi4py import MPI

    def reduce(*gradients: np.ndarray) -> list[np.ndarray]:
        buffer = np.concatenate([gradient.ravel() for gradient in gradients])
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)
        buffer /= MPI.COMM_WORLD.Get_size()
        ends = np.cumsum([gradient.size for gradient in gradients])[:-1]
        return [part.reshape(g.shape).copy() for part, g in zip(np.split(buffer, ends), gradients, strict=True)]

    apply = optimizer.apply

    def averaged(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        found = tf.numpy_function(reduce, list(grads), [g.dtype for g in grads])
        apply([tf.ensure_shape(f, g.shape) for f, g in zip(found, grads, strict=True)], trainable_variables)

    optimizer.__dict__["apply"] = averaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=60.0, help="approximate time to spend on each model")
    parser.add_argument("--network", type=float, default=0.0, help="GB/s of a simulated network, on TensorFlow")
    parser.add_argument("--sharded", action="store_true", help="compare plain and sharded updates with Adam")
    options = parser.parse_args()
    if options.network and BACKEND != "tensorflow":
        parser.error("--network is for TensorFlow")
    ring.init(ranks=2)
    kinds = ["none", "ours", "one bucket"] if options.network else ["none", "ours"]
    if options.sharded:
        kinds = ["none", "ours", "sharded"]
    elif not options.network and BACKEND != "torch":
        kinds += ["copied", "fused"] if BACKEND == "tensorflow" and current().launcher == "mpi" else ["copied"]
    rows: dict[str, dict[str, Times]] = {}
    for name in options.models:
        made = {kind: step_of(kind, name, options.network * 1e9, options.sharded) for kind in kinds}
        steps = {kind: step for kind, (step, _) in made.items()}
        for step in [step for kind, step in steps.items() if kind not in ("none", "fused")]:
            for _ in range(TRIAL):
                step()
        probe = interleaved(steps, 3)
        repetitions = int(min(300, max(9, options.seconds / sum(times.median for times in probe.values()))))
        rows[name] = interleaved(steps, repetitions)
        if options.sharded:
            kept = {kind: state_bytes(optimizer) / 1e6 for kind, (_, optimizer) in made.items()}
            print(f"rank {ring.rank()} keeps, in MB of optimizer state: {kept}")
    if ring.rank() == 0:
        report(rows, options.network, "_sharded" if options.sharded else "_network" if options.network else "")
    ring.barrier()


def state_bytes(optimizer: Any) -> int:
    return sum(keras.ops.convert_to_numpy(variable).nbytes for variable in optimizer.variables)


def report(rows: dict[str, dict[str, Times]], network: float, what: str) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"training step, {BACKEND}, {ring.size()} ranks: median ms (quartiles)"
    table = Table(title=title + (f", network of {network:g} GB/s" if network else ""), caption=machine())
    table.add_column("model")
    kinds = list(next(iter(rows.values())))
    for kind in [*kinds, *(f"{kind} / none" for kind in kinds[1:])]:
        table.add_column(kind, justify="right")
    for name, times in rows.items():
        cells = [f"{t.median * 1e3:.1f} ({t.low * 1e3:.0f}-{t.high * 1e3:.0f})" for t in times.values()]
        table.add_row(name, *cells, *(f"{times[kind].median / times['none'].median:.2f}" for kind in kinds[1:]))
    Console(width=150).print(table)
    seconds = {name: {kind: vars(t) for kind, t in times.items()} for name, times in rows.items()}
    save(f"keras_step_{BACKEND}{what}", {"network GB/s": network, "seconds": seconds})


if __name__ == "__main__":
    main()
