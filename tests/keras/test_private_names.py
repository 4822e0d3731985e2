"""What private names of Keras are taken for: a version of Keras that changes one fails here, not in somebody's fit."""

import ast

import pytest

from tests.keras.launches import BACKENDS, environment
from tests.launch import run_ranks

SCRIPT = """
import keras
import numpy as np
from tests.worker import report

x = np.ones((8, 3), "float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
model.compile(optimizer, "mse", metrics=[keras.metrics.MeanMetricWrapper(lambda y, p: y - p)])
seen = {"initial epoch at first": model._initial_epoch}
read, calls = model._get_metrics_result_or_logs, []
vars(model)["_get_metrics_result_or_logs"] = lambda logs: calls.append(1) or read(logs)
epochs = []
note = keras.callbacks.LambdaCallback(
    on_train_begin=lambda logs: epochs.append(model._initial_epoch),
    on_epoch_begin=lambda epoch, logs: epochs.append(epoch),
)
options = {"batch_size": 2, "initial_epoch": 2, "epochs": 3, "verbose": 0, "validation_data": (x, x[:, :1])}
model.fit(x, x[:, :1], callbacks=[note], **options)
# Only BackupAndRestore sets it: the first epoch is what on_epoch_begin gets.
seen["initial epoch in fit"] = epochs
seen["metrics are read"] = len(calls)  # at the end of the epoch and of the validation
seen["batches and updates"] = [int(optimizer._iterations), int(optimizer.iterations)]
trained, sums = model.trainable_variables, optimizer._accumulated_gradients
seen["trained"] = [one is other for one, other in zip(optimizer._trainable_variables, trained, strict=True)]
seen["places"] = [optimizer._trainable_variables_indices[optimizer._var_key(one)] for one in trained]
seen["sums"] = [tuple(one.shape) == tuple(other.shape) for one, other in zip(sums, trained, strict=True)]
seen["rate"] = isinstance(optimizer._learning_rate, keras.Variable)
schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)
seen["schedule"] = keras.optimizers.SGD(schedule)._learning_rate is schedule
given = keras.tree.flatten([model._compile_metrics._user_metrics, model._compile_metrics._user_weighted_metrics])
seen["metrics given"] = [type(one).__name__ for one in given if one is not None]
seen["layers"] = sum(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers())
seen["moments"] = callable(model.layers[1]._moments)
callbacks = keras.callbacks.CallbackList([keras.callbacks.Callback()], model=model)
seen["calls in a thread"] = isinstance(callbacks._async_train, bool)
report("seen", {name: repr(value) for name, value in seen.items()})
"""


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=[] if name == "torch" else [pytest.mark.slow]) for name in BACKENDS]
)
def test_private_names_of_keras_are_what_they_are_taken_for(backend):
    (found,) = run_ranks(SCRIPT, 1, env=environment(backend), timeout=300).values("seen")
    assert {name: ast.literal_eval(value) for name, value in found.items()} == {
        "initial epoch at first": None,
        "initial epoch in fit": [None, 2],
        "metrics are read": 2,
        "batches and updates": [4, 2],
        "trained": [True] * 4,
        "places": [0, 1, 2, 3],
        "sums": [True] * 4,
        "rate": True,
        "schedule": True,
        "metrics given": ["MeanMetricWrapper"],
        "layers": 1,
        "moments": True,
        "calls in a thread": True,
    }
