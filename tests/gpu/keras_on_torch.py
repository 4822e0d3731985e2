"""Keras's `fit` on torch ends with the weights of one process on all ranks' batches."""

# ruff: noqa: E402  # Keras reads its backend when it is imported

import os

os.environ["KERAS_BACKEND"] = "torch"

from tests.gpu.card import CUDA, RANK, RANKS, SIMULATED, fact, needs_a_card, ring

needs_a_card()

import keras
import numpy as np

from ring_plugins.keras import BroadcastCallback

BATCH, BATCHES = 8, 4
rng = np.random.default_rng(0)
x = rng.normal(size=(BATCHES * RANKS * BATCH, 32)).astype("float32")
y = x.sum(1, keepdims=True)


def trained(averages: bool, jit_compile: bool, shard: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The weights, and on rank 0 the optimizer's state."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=jit_compile)
    parts = x.reshape(BATCHES, RANKS, BATCH, -1), y.reshape(BATCHES, RANKS, BATCH, -1)
    mine = [(part[:, RANK] if averages else part).reshape(-1, part.shape[-1]) for part in parts]
    model.fit(
        *mine, BATCH if averages else RANKS * BATCH, epochs=1, shuffle=False, verbose=0,
        callbacks=[BroadcastCallback(shard_optimizer=shard)] if averages else [],
    )  # fmt: skip
    device = "cuda" if CUDA else "cpu"
    assert {str(weight.value.device.type) for weight in model.weights} == {device}
    state = model.optimizer.variables if RANK == 0 else []
    weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    return weights, np.concatenate([np.zeros(1), *(np.ravel(keras.ops.convert_to_numpy(one)) for one in state)])


# Compiling for the CPU needs a C++ compiler.
for jit_compile, shard in [(False, False), (False, True), *([(True, False)] if CUDA and not SIMULATED else [])]:
    (ours, our_state), (alone, its_state) = trained(True, jit_compile, shard), trained(False, jit_compile)
    rows = ring.all_gather(ours[None])
    worst = float(max(np.abs(ours - alone).max(), np.abs(our_state - its_state).max()))
    fact(
        check="Keras on torch",
        jit_compile=jit_compile,
        shard=shard,
        same_on_all_ranks=all(bool((rows[0] == row).all()) for row in rows),
        worst=worst,
        close=worst < 1e-5,
    )
