"""A rank of Keras's `fit` on torch and GPUs is killed in a step, and the others finish it."""

# Keras reads its backend when it is imported

import os
import signal

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

import ring_plugins as ring
from ring_plugins.core.gpu.executor import DeviceExecutor
from ring_plugins.keras import BroadcastCallback
from tests.worker import report

RANKS = int(os.environ["TEST_RANKS"])
ring.init(ranks=RANKS, on_failure="continue")
torch.cuda.set_device(ring.local_rank())
rng = np.random.default_rng(ring.rank())
x = rng.normal(size=(48, 16)).astype("float32")


class Dies(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if batch == 3 and ring.rank() == 1 and ring.size() == RANKS:
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(ring.rank())
model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse")
launches = 0
launch = DeviceExecutor.launch


def counted(*args, **keywords):
    global launches
    launches += 1
    return launch(*args, **keywords)


DeviceExecutor.launch = counted
model.fit(x, x.sum(1, keepdims=True), 8, epochs=2, verbose=0, callbacks=[BroadcastCallback(), Dies()])
weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
everywhere = ring.all_gather_object(weights)
report("size", ring.size())
report("unlike rank 0", int((weights != everywhere[0]).sum()))
report("finite", bool(np.isfinite(weights).all()))
report("launches", launches)
report("device", {str(weight.value.device.type) for weight in model.weights}.pop())
ring.shutdown()
