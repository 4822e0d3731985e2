"""TensorFlow's gradients by NCCL: with stand-ins for the card and for NCCL, which take the CPU's tensors."""

import warnings

import keras
import pytest

from ring_plugins.keras import on_gpu
from tests.keras.launches import START, environment
from tests.launch import run_ranks

FIT = (
    START
    + """
import keras
import numpy as np
import tensorflow as tf

from ring_plugins.keras import BroadcastCallback, DistributedOptimizer
from ring_plugins.keras.averaging import averaging_of
from ring_plugins.keras.backends import tensorflow_device
from tests.gpu_stand_in import install
from tests.worker import report

library, _ = install()
tensorflow_device.GPU, tensorflow_device.KIND = "CPU:0", 1
rank, size = ring.rank(), ring.size()
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
        buckets = averaging_of(self.model.optimizer).buckets
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
    library.log.clear()
    callback = BroadcastCallback()
    model.optimizer = DistributedOptimizer(model.optimizer, bucket_bytes=100)
    model.fit(batches, epochs=2, verbose=0, callbacks=[callback, Look()])
    report(name, float(np.abs(flat(model) - flat(alone)).max()))
    report(name + " equal", len(set(ring.all_gather_object(flat(model).tobytes()))))
    report(name + " by NCCL", sum(call == ["all_reduce"] for call in library.log))
report("seen", seen)

# A gradient on some ranks only.
optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
variables = [keras.Variable(np.ones(3, "float32")), keras.Variable(np.ones(2, "float32"))]
optimizer.build(variables)
gradients = [tf.ones(3), None if rank == 0 else tf.ones(2)]
try:
    optimizer.apply(gradients, variables)
except Exception as error:
    from ring_plugins.keras.failure import taken
    report("refused", str(taken(error)))
"""
)


def test_tensorflow_by_nccl_equals_one_process():
    result = run_ranks(FIT, 2, env=environment("tensorflow", RING_TENSORFLOW_NCCL="1"), timeout=150)
    for name in ("plain", "two steps", "XLA"):
        assert max(result.values(name)) < 1e-5
        assert result.values(f"{name} equal") == [1, 1]
        assert result.values(f"{name} by NCCL") == [8 * 3] * 2
    kinds = {tuple(entry) for entry in result.values("seen")[0]}
    assert kinds == {("DeviceBuckets", 3)}
    assert "lacks a gradient" in result.values("refused")[0]
    assert "has a gradient" in result.values("refused")[1]


@pytest.mark.parametrize(
    ("backend", "setting", "said"),
    [
        ("tensorflow", "0", "RING_TENSORFLOW_NCCL=1"),
        ("tensorflow", "1", None),
        ("jax", "0", "keras.distribution.DataParallel"),
        ("torch", "0", None),
    ],
)
def test_what_gpus_cost_is_said_where_gradients_leave_them(monkeypatch, backend, setting, said):
    monkeypatch.setenv("RING_TENSORFLOW_NCCL", setting)
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    monkeypatch.setattr(on_gpu, "_computes_on_gpus", lambda backend: True)
    on_gpu.say_what_gpus_cost.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_gpu.say_what_gpus_cost(0)
    on_gpu.say_what_gpus_cost.cache_clear()
    assert [said in str(warning.message) for warning in caught] == ([True] if said else [])
