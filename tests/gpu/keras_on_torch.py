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


def trained(averages: bool, jit_compile: bool) -> np.ndarray:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=jit_compile)
    parts = x.reshape(BATCHES, RANKS, BATCH, -1), y.reshape(BATCHES, RANKS, BATCH, -1)
    mine = [(part[:, RANK] if averages else part).reshape(-1, part.shape[-1]) for part in parts]
    model.fit(
        *mine, BATCH if averages else RANKS * BATCH, epochs=1, shuffle=False, verbose=0,
        callbacks=[BroadcastCallback()] if averages else [],
    )  # fmt: skip
    assert {str(weight.value.device.type) for weight in model.weights} == {"cuda" if CUDA else "cpu"}
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


for jit_compile in (False, True) if CUDA and not SIMULATED else (False,):  # compiling for the CPU needs a C++ compiler
    ours, alone = trained(True, jit_compile), trained(False, jit_compile)
    rows = ring.all_gather(ours[None])
    worst = float(np.abs(ours - alone).max())
    fact(
        check="Keras on torch",
        jit_compile=jit_compile,
        same_on_all_ranks=all(bool((rows[0] == row).all()) for row in rows),
        worst=worst,
        close=worst < 1e-5,
    )
