"""Keras's `fit` on torch and GPUs with a sharded optimizer ends with the weights of one that is not."""

# Keras reads its backend when it is imported

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
torch.cuda.set_device(ring.local_rank())
x = np.random.default_rng(ring.rank()).normal(size=(48, 16)).astype("float32")


def fitted(shard: bool) -> np.ndarray:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(33, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(
        x, x.sum(1, keepdims=True), 8, epochs=2, verbose=0, shuffle=False,
        callbacks=[BroadcastCallback(shard_optimizer=shard)],
    )  # fmt: skip
    assert {weight.value.device.type for weight in model.weights} == {"cuda"}
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


sharded, plain = fitted(True), fitted(False)
report("finite", bool(np.isfinite(sharded).all()))
report("unlike rank 0", int((sharded != ring.all_gather_object(sharded)[0]).sum()))
report("largest difference", float(np.abs(sharded - plain).max()))
