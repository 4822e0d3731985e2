"""NCCL reduces TensorFlow's gradients: on a card, and CPU tensors on simulated ones (tests/gpu_rehearsal)."""

import importlib.util
import os

import pytest
import torch

from tests.keras.launches import START, environment
from tests.launch import run_ranks

FIT = (
    START
    + """
SIMULATED = "RING_SIMULATED_HOST_MEMORY" in os.environ
if SIMULATED:
    from tests.gpu_rehearsal.devices import count, load

    os.environ["CUDA_VISIBLE_DEVICES"] = str(ring.local_rank())
    load()

import keras
import numpy as np
import tensorflow as tf

from ring_plugins.keras import BroadcastCallback, DistributedOptimizer
from ring_plugins.keras.averaging import averaging_of
from ring_plugins.keras.backends import tensorflow_device
from tests.worker import report

rank, size = ring.rank(), ring.size()
if SIMULATED:
    tensorflow_device.GPU, tensorflow_device.KIND = "CPU:0", 1
else:
    gpus = tf.config.list_physical_devices("GPU")
    gpu = gpus[ring.local_rank() % len(gpus)]
    tf.config.set_visible_devices(gpu, "GPU")
    tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.experimental.enable_tensor_float_32_execution(False)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(48, 5)).astype("float32"), rng.normal(size=(48, 1)).astype("float32")
seen = []


def built(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(40, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    return model


class Look(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        buckets = averaging_of(self.model.optimizer).exchange.buckets
        seen.append((type(buckets).__name__, len(buckets.plan.buckets)))


def flat(model):
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


alone = built(jit_compile=False)
alone.fit(x, y, batch_size=12, shuffle=False, epochs=2, verbose=0)
for name, options in {
    "plain": {"jit_compile": False},
    "two steps": {"jit_compile": False, "steps_per_execution": 2},
    "XLA": {"jit_compile": True},
}.items():
    model = built(**options)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(12).map(
        lambda a, b: (a[rank * 12 // size : (rank + 1) * 12 // size], b[rank * 12 // size : (rank + 1) * 12 // size])
    )
    before = SIMULATED and count("ncclAllReduce")
    callback = BroadcastCallback()
    model.optimizer = DistributedOptimizer(model.optimizer, bucket_bytes=100)
    model.fit(batches, epochs=2, verbose=0, callbacks=[callback, Look()])
    report(name, float(np.abs(flat(model) - flat(alone)).max()))
    report(name + " equal", len(set(ring.all_gather_object(flat(model).tobytes()))))
    report(name + " by NCCL", SIMULATED and count("ncclAllReduce") - before)
# Rank 0 has five batches of six samples, rank 1 has three.
parts = [[(x[i : i + 6], y[i : i + 6]) for i in range(*ends, 6)] for ends in ((0, 30), (30, 48))]
whole = [tuple(map(np.concatenate, zip(*(part[i] for part in parts if i < len(part))))) for i in range(5)]
alone = built(jit_compile=False)
alone.fit((batch for batch in whole), verbose=0)
for name, compiles in (("uneven", False), ("uneven XLA", True)):
    model = built(jit_compile=compiles)
    before = SIMULATED and count("ncclAllReduce")
    model.optimizer = DistributedOptimizer(model.optimizer, bucket_bytes=100)
    model.fit((batch for batch in parts[rank]), verbose=0, callbacks=[BroadcastCallback(), Look()])
    report(name, float(np.abs(flat(model) - flat(alone)).max()))
    report(name + " equal", len(set(ring.all_gather_object(flat(model).tobytes()))))
    report(name + " by NCCL", SIMULATED and count("ncclAllReduce") - before)
report("seen", seen)

# A factor that bfloat16 would round; a mean ratio above 1 would be a bias.
numbers = tf.cast(tf.random.uniform([4096], 1, 2), tf.bfloat16)
ratios = tf.cast(tensorflow_device._scaled(numbers, 1 / 3), tf.float64) * 3 / tf.cast(numbers, tf.float64)
report("bias", abs(float(tf.reduce_mean(ratios)) - 1))

# A gradient on some ranks only.
optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
variables = [keras.Variable(np.ones(3, "float32")), keras.Variable(np.ones(2, "float32"))]
optimizer.build(variables)
gradients = [tf.ones(3), None if rank == 0 else tf.ones(2)]
try:
    optimizer.apply(gradients, variables)
except Exception as error:
    from ring_plugins.keras.job import restored
    report("rejected", str(restored(error)))
"""
)


def check_equality(**more):
    result = run_ranks(FIT, 2, env=environment("tensorflow", RING_TENSORFLOW_NCCL="1", **more), timeout=250)
    for name in ("plain", "two steps", "XLA", "uneven", "uneven XLA"):
        assert max(result.values(name)) < 1e-5
        assert result.values(f"{name} equal") == [1, 1]
    assert max(result.values("bias")) < 2e-4
    kinds = {tuple(entry) for entry in result.values("seen")[0]}
    assert kinds == {("DeviceBuckets", 3)}
    assert "has no gradient" in result.values("rejected")[0]
    assert "has a gradient" in result.values("rejected")[1]
    return result


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here")
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("keras", "tensorflow"))), reason="Keras on TensorFlow is not installed"
)
def test_the_same_on_a_card():
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    shares = "1" if torch.cuda.device_count() < 2 else "0"
    check_equality(XLA_FLAGS="", CUDA_VISIBLE_DEVICES=visible, RING_SHARE_GPU=shares)
