"""Sums, several passes, and gradients of one rank alone, against what Horovod's optimizers do."""

import pytest

from tests.launch import run_ranks

SCRIPT = """
import keras
import numpy as np
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=int("RANKS"))
import ring_plugins.horovod.keras as hvd

rank = hvd.rank()
is_torch = keras.backend.backend() == "torch"

def model_of(value=1.0):
    layers = [keras.layers.Dense(1, use_bias=False, name="first"), keras.layers.Dense(1, use_bias=False, name="last")]
    model = keras.Sequential([keras.Input((1,)), *layers])
    for layer in layers:
        layer.set_weights([np.full((1, 1), value)])
    return model, layers

def weights(model):
    return [round(float(value.ravel()[0]), 5) for value in model.get_weights()]

def fitted(optimizer, model, batches=1, callbacks=(), **options):
    # d loss / d weight of a layer = 2 * prediction * other weight, times rank + 1
    model.compile(loss=lambda y, prediction: y * prediction, optimizer=optimizer, **options)
    x, y = np.ones((batches, 1), "float32"), np.full((batches, 1), rank + 1.0, "float32")
    model.fit(x, y, batch_size=1, epochs=1, verbose=0, callbacks=list(callbacks))
    return weights(model)

SGD = keras.optimizers.SGD
report("average", fitted(hvd.DistributedOptimizer(SGD(0.1)), model_of()[0]))
report("sum", fitted(hvd.DistributedOptimizer(SGD(0.1), op=hvd.Sum), model_of()[0]))
for name, options in (
    ("passes", {}), ("mean of passes", {"average_aggregated_gradients": True}), ("sums of passes", {"op": hvd.Sum})
):
    optimizer = hvd.DistributedOptimizer(SGD(0.1), backward_passes_per_step=2, **options)
    report(name, fitted(optimizer, model_of()[0], batches=2))

if not is_torch:
    model, layers = model_of(1.0)
    partial = hvd.PartialDistributedOptimizer(SGD(0.1), local_layers=layers[0])
    report("partial", fitted(partial, model))
    model, layers = model_of(1.0)
    partial = hvd.PartialDistributedOptimizer(
        SGD(0.1), local_layers=layers[:1], scale_local_gradients=False, backward_passes_per_step=2)
    report("partial passes", fitted(partial, model, batches=2))
    # Local variables begin with other values, are trained apart, and nobody minds at the end of the epoch.
    model, layers = model_of(1.0 + rank)
    optimizer = hvd.DistributedOptimizer(SGD(0.1))
    optimizer.register_local_var(layers[0].kernel)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=layers[0].trainable_variables)
    report("local", fitted(optimizer, model, 2, [callback]))
    try:
        optimizer.register_local_var(layers[1].kernel)
    except ring.ArgumentError as error:
        report("late", str(error))

rejected = []
for call in (
    lambda: hvd.DistributedOptimizer(SGD(0.1), op=hvd.Max),
    lambda: hvd.DistributedOptimizer(SGD(0.1), backward_passes_per_step=0),
    lambda: hvd.DistributedOptimizer(optimizer, backward_passes_per_step=3),
    lambda: hvd.PartialDistributedOptimizer(SGD(0.1), local_layers=[keras.layers.Dense(1)]),
    lambda: hvd.PartialDistributedOptimizer(SGD(0.1), local_layers=[1]),
    lambda: hvd.callbacks.MetricAverageCallback(process_set=3),
):
    try:
        call()
    except ring.ArgumentError as error:
        rejected.append(str(error))
report("rejected", rejected)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_gradients_are_combined_as_horovod_does(backend):
    result = run_ranks(SCRIPT.replace("RANKS", "2"), 2, env={"KERAS_BACKEND": backend})
    values = result.values
    assert values("average") == [[0.85, 0.85]] * 2
    assert values("sum") == [[0.7, 0.7]] * 2
    assert values("passes") == [[0.7, 0.7]] * 2
    assert values("mean of passes") == [[0.85, 0.85]] * 2
    assert values("sums of passes") == [[0.4, 0.4]] * 2
    if backend != "torch":
        assert values("partial") == [[0.95, 0.85], [0.9, 0.85]]
        assert values("partial passes") == [[0.8, 0.7], [0.6, 0.7]]
        # Rank r: first 1 + r; the last begins with 1 on both. Two steps: first -= 0.1 * (r + 1) * last / 2, and last
        # -= 0.1 * the mean of (r + 1) * first
        assert values("local") == [[0.9125, 0.5125], [1.825, 0.5125]]
        assert "first step" in values("late")[0]
    for texts in values("rejected"):
        assert len(texts) == 6, texts
        parts = "op=", "passes_per_step=0", "passes_per_step=3", "not built", "local_layers has 1", "process_set"
        for text, part in zip(texts, parts, strict=True):
            assert part in text, text


@pytest.mark.slow
def test_one_rank_adds_passes_too():
    result = run_ranks(SCRIPT.replace("RANKS", "1"), 1, env={"KERAS_BACKEND": "tensorflow"})
    assert result.values("passes") == [[0.8, 0.8]]
    assert result.values("mean of passes") == [[0.9, 0.9]]
    assert result.values("partial") == [[0.9, 0.9]]
