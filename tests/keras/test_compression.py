"""Compression to 16 bits between hosts takes effect, and all ranks get the same weights."""

import pytest

from tests.keras.launches import environment
from tests.launch import run_ranks

FIT = """
import keras
import numpy as np

import ring_plugins as ring
from ring_plugins.core.gradients import trials
from ring_plugins.keras import BroadcastCallback, shard
from tests.worker import report

ring.init()
trials._WARM_UP, trials._TURNS, trials._STEPS = 0, 1, 2  # so that each way has two of the eight steps of a fit
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 200)).astype("float32")
y = x.sum(1, keepdims=True)
for name, options in {
    "exact": {},
    "bf16": {"compression": "bf16", "error_feedback": True},
    "int8": {"compression": "int8"},
    "auto": {"compression": "auto"},
}.items():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((200,)), keras.layers.Dense(300, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.001), "mse")
    model.fit(shard((x, y), batch_size=8), shuffle=False, epochs=2, verbose=0, callbacks=[BroadcastCallback(**options)])
    report(name, np.concatenate([np.ravel(weight) for weight in model.get_weights()])[:2000])
try:
    BroadcastCallback(compression="int4")
except ring.ArgumentError as error:
    report("rejected", str(error))
"""


@pytest.mark.mpi
@pytest.mark.slow
def test_compression_between_hosts():
    result = run_ranks(FIT, 2, "mpirun", env=environment("jax", RING_VIRTUAL_NODES="2"), timeout=120)
    for name, largest in (("exact", 0), ("bf16", 1e-3), ("int8", 1e-2), ("auto", 1e-2)):
        first, second = result.values(name)
        assert first == second
        pairs = zip(first, result.values("exact")[0], strict=True)
        assert largest == 0 or 0 < max(abs(rounded - exact) for rounded, exact in pairs) < largest
    assert "compression='int4'" in result.values("rejected")[0]
