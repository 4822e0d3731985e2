"""Sharded optimizers: what a rank keeps, files, custom loops, and what is rejected."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import keras
import numpy as np

import ring_plugins as ring
from ring_plugins.keras import (
    BalanceMonitor,
    BroadcastCallback,
    DistributedOptimizer,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    broadcast_variables,
    undistribute,
)
from tests.keras.behaviors import behavior, error_of
from tests.keras.scenarios import BACKEND, features, wide

SHARDED = {"shard_optimizer": True}


def fit(model: Any, callbacks: Any = (), steps: int = 4, shard_optimizer: bool = True, **options: Any) -> None:
    x, y = (part[ring.rank() :: ring.size()] for part in features(ring.size(), steps))
    callbacks = [BroadcastCallback(shard_optimizer=shard_optimizer), *callbacks]
    model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=callbacks, **options)


def values(variables: Any) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def adam(**options: Any) -> Any:
    keras.utils.set_random_seed(ring.rank())
    return wide(keras.optimizers.Adam(1e-3, **options))


def nbytes(optimizer: Any) -> int:
    return sum(value.nbytes for value in values(optimizer.variables))


def apply_ones(model: Any) -> None:
    """An update without averaging, after fit."""
    variables = model.trainable_variables
    gradients = [keras.ops.ones_like(variable.value) for variable in variables]
    if BACKEND != "torch":
        model.optimizer.apply(gradients, variables)
        return
    import torch

    with torch.no_grad():
        model.optimizer.apply(gradients, variables)


@behavior
def state_of_a_sharded_optimizer() -> Any:
    """Bytes that a rank keeps during and after fit, and whether rank 0 may save then, and other ranks not."""

    class Bytes(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen = nbytes(self.model.optimizer)

    model, during = adam(), Bytes()
    fit(model, [during])
    whole = 8 * model.count_params()
    found = {
        "share": during.seen / whole,
        "after": nbytes(model.optimizer) / whole,
        "saves": error_of(lambda: model.optimizer.save_own_variables({})),
        "steps": error_of(lambda: apply_ones(model)),
        "own": sorted(name for name in vars(model.optimizer) if "ring" in name),
        "distributes": error_of(lambda: DistributedOptimizer(model.optimizer)),
    }
    undistribute(model.optimizer)
    broadcast_variables(model)
    return found | {"broadcast": [float(value.sum()) for value in values(model.optimizer.variables)]}


@behavior
def files_of_a_sharded_optimizer() -> Any:
    """A checkpoint in the middle of an epoch, with its state, beside that of an optimizer that is not sharded.

    Then training that continues from it, beside training that was not interrupted.
    """
    directory = Path(ring.broadcast_object(mkdtemp()))
    checkpoint = lambda name: keras.callbacks.ModelCheckpoint(directory / f"{name}.keras", save_freq=3)  # noqa: E731
    found: dict[str, Any] = {}
    for name, shards in (("sharded", True), ("plain", False)):
        model = adam()
        others = [BalanceMonitor(summary=False), MetricAverageCallback()]
        # What saves does not come last in this list.
        fit(model, [checkpoint(name), *others, LearningRateWarmupCallback(2)], shard_optimizer=shards, epochs=2)
        if ring.rank() == 0:
            loaded = keras.models.load_model(directory / f"{name}.keras")
            found[name] = values(loaded.optimizer.variables)
    ring.barrier()
    ends = []
    for backup in (directory / "backup", None):
        model = adam()
        if backup is not None:
            interrupted = [keras.callbacks.BackupAndRestore(backup, delete_checkpoint=False)]
            fit(model, interrupted, epochs=1)
            model = adam()
            fit(model, interrupted, epochs=3)
        else:
            fit(model, epochs=3)
        ends.append(values(model.weights))
    state = [
        float(np.linalg.norm(a.astype(float) - b) / (np.linalg.norm(b) or 1.0))
        for a, b in zip(found.get("sharded", []), found.get("plain", []), strict=True)
    ]
    shapes = [[value.shape for value in found.get(name, [])] for name in ("sharded", "plain")]
    return {
        "state": state,
        "same shapes": shapes[0] == shapes[1],
        "continues": all(map(np.array_equal, *ends)),
        "weights": [float(value.sum()) for value in ends[0]],
    }


def step_of(model: Any) -> Any:
    """A training step of the script's own."""
    optimizer = model.optimizer
    if BACKEND == "tensorflow":
        import tensorflow as tf

        @tf.function
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        return step
    if BACKEND == "torch":
        import torch

        def step(x: Any, y: Any) -> None:
            model.zero_grad()
            ((model(x) - torch.from_numpy(y)) ** 2).mean().backward()
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)

        return step
    import jax

    optimizer.build(model.trainable_variables)

    @jax.jit
    def compiled(state: Any, x: Any, y: Any) -> Any:
        loss = lambda weights: ((model.stateless_call(weights, [], x)[0] - y) ** 2).mean()  # noqa: E731
        return optimizer.stateless_apply(state[1], jax.grad(loss)(state[0]), state[0])

    def step(x: Any, y: Any) -> None:
        variables = model.trainable_variables, optimizer.variables
        updated = compiled([[v.value for v in some] for some in variables], x, y)
        for some, new in zip(variables, updated, strict=True):
            for variable, value in zip(some, new, strict=True):
                variable.assign(value)

    return step


@behavior
def own_loop_of_a_sharded_optimizer() -> Any:
    """Ten steps, beside those of an optimizer that is not sharded; then its state in another one, and undistributed."""
    ends, states = [], []
    x, y = (part[ring.rank() :: ring.size()] for part in features(ring.size(), 1))
    for options in (SHARDED, {}):
        keras.utils.set_random_seed(0)
        model = wide(DistributedOptimizer(keras.optimizers.Adam(1e-3), **options))
        step = step_of(model)
        for _ in range(10):
            step(x, y)
        ends.append(values(model.weights))
        store: dict[str, Any] = {}
        model.optimizer.save_own_variables(store)
        states.append([np.asarray(store[str(i)]) for i in range(len(store))])
        if options:
            keras.utils.set_random_seed(0)
            other = wide(DistributedOptimizer(keras.optimizers.Adam(1e-3), **options))
            other.set_weights(model.get_weights())
            other.optimizer.build(other.trainable_variables)
            other.optimizer.load_own_variables(store)
            again = step_of(other)
            step(x, y)
            again(x, y)
            continues = all(map(np.array_equal, values(model.weights), values(other.weights)))
            share = nbytes(other.optimizer) / (8 * other.count_params())
            undistribute(other.optimizer)
            own = sorted(name for name in vars(other.optimizer) if "ring" in name)
            whole = nbytes(other.optimizer) / (8 * other.count_params())
    return {
        "weights": [float(abs(a - b).max()) for a, b in zip(*ends, strict=True)],
        "state": [float(abs(a.astype(float) - b).max()) for a, b in zip(*states, strict=True)],
        "continues": continues,
        "share": share,
        "whole": whole,
        "own": own,
        "sums": [float(value.sum()) for value in ends[0]],
    }


@behavior
def state_that_only_the_root_has_loaded() -> Any:
    """`broadcast_variables` divides the root's state; weights that differ are rejected without it."""
    model = adam()
    fit(model, shard_optimizer=False)
    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    other = wide(DistributedOptimizer(keras.optimizers.Adam(1e-3), **SHARDED))
    other.optimizer.build(other.trainable_variables)
    if ring.rank() == 0:
        other.set_weights(model.get_weights())
        other.optimizer.load_own_variables(store)
    broadcast_variables(other)
    found: dict[str, Any] = {}
    other.optimizer.save_own_variables(found)
    keras.utils.set_random_seed(ring.rank())
    different = wide(DistributedOptimizer(keras.optimizers.Adam(1e-3), **SHARDED))
    x, y = features(1, 1)
    return {
        "equal": all(np.array_equal(found[key], store[key]) for key in store),
        "different": error_of(lambda: step_of(different)(x, y)),
    }


@behavior
def rejected_by_a_sharded_optimizer() -> Any:
    """Optimizers that look at whole tensors; options that differ; formats that ask the optimizer for its variables."""

    def different_rate() -> None:
        keras.utils.set_random_seed(0)
        model = wide(DistributedOptimizer(keras.optimizers.Adam(1e-3), **SHARDED))
        step, (x, y) = step_of(model), features(1, 1)
        step(x, y)
        if ring.rank() == 1:
            model.optimizer.learning_rate = 0.5
        step(x, y)
        values(model.weights)  # JAX computes meanwhile

    class Own(keras.optimizers.Adam):
        pass

    old = keras.callbacks.ModelCheckpoint(Path("model.h5"))
    return {
        "adafactor": error_of(lambda: DistributedOptimizer(keras.optimizers.Adafactor(), **SHARDED)),
        "lamb": error_of(lambda: fit(wide(keras.optimizers.Lamb()))),
        "own": error_of(lambda: DistributedOptimizer(Own(), **SHARDED)),
        "plain": error_of(lambda: fit(wide(DistributedOptimizer(keras.optimizers.Adam())))),
        "format": error_of(lambda: fit(adam(), [old])),
        "rate": error_of(different_rate),
    }


@behavior
def sharded_fit_after_an_exception() -> Any:
    """An exception on one rank ends fit on all; the next fit goes on with the parts."""

    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if ring.rank() == 1:
                raise ValueError("one rank only")

    model = adam()
    error = error_of(lambda: fit(model, [Fails()]))
    saves = error_of(lambda: model.optimizer.save_own_variables({}))
    fit(model)
    steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    return {
        "error": error,
        "saves": saves,
        "steps": steps,
        "weights": [float(value.sum()) for value in values(model.weights)],
        "whole": nbytes(model.optimizer) / (8 * model.count_params()),
    }
