"""Metrics on all ranks' data."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import keras
import numpy as np
from keras import layers

import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback, MetricAverageCallback
from tests.keras.behaviors import behavior
from tests.keras.scenarios import dense


class Largest(keras.metrics.Metric):
    """A metric whose state is not a sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.seen = self.add_variable((), "zeros", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign(keras.ops.maximum(self.seen, keras.ops.max(y_true)))

    def result(self) -> Any:
        return self.seen.value


@behavior
def metrics_of_uneven_shards() -> Any:
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(3)
    x = random.normal(size=(90, 5)).astype("float32")
    y = (x[:, :1] + random.normal(size=(90, 1)) > 0).astype("float32")
    weight = np.linspace(0.5, 2.0, 90).astype("float32")
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1, activation="sigmoid")])
    names = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
    names += [keras.metrics.R2Score(name="r2"), keras.metrics.RootMeanSquaredError(name="rmse")]
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="binary_crossentropy", metrics=names)
    expected = model.evaluate(x, y, sample_weight=weight, batch_size=8, verbose=0, return_dict=True)
    mine = slice(0, 60) if ring.rank() == 0 else slice(60, 90)
    alone = {"batch_size": 8, "verbose": 0, "return_dict": True, "callbacks": [MetricAverageCallback()]}
    found = model.evaluate(x[mine], y[mine], sample_weight=weight[mine], **alone)
    local = model.evaluate(x[mine], y[mine], sample_weight=weight[mine], batch_size=8, verbose=0, return_dict=True)
    seen: list[dict[str, float]] = []
    history = model.fit(
        x[:32], y[:32], batch_size=8, epochs=2, verbose=0, validation_freq=2,
        validation_data=(x[mine], y[mine], weight[mine]),
        # Callbacks before ours must see the same numbers as later ones.
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs))),
                   BroadcastCallback(), MetricAverageCallback()],
    ).history  # fmt: skip
    validated = {name: seen[-1][f"val_{name}"] for name in expected}
    return {
        "expected": expected, "evaluate": found, "local": local, "validation": validated,
        "validations": len(history["val_auc"]), "history": history["val_auc"][-1], "seen": seen[-1]["val_auc"],
        "left": MetricAverageCallback._METHOD in vars(model),
    }  # fmt: skip


@behavior
def metric_that_is_no_sum() -> Any:
    import warnings

    model = dense(keras.optimizers.SGD(0.0), metrics=[Largest()])
    y = np.full((8, 1), 1.0 + 2 * ring.rank(), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = model.evaluate(
            np.zeros((8, 5), "float32"), y, verbose=0, return_dict=True, callbacks=[MetricAverageCallback()]
        )
    return {"largest": logs["largest"], "said": [str(w.message) for w in caught if "is not a sum" in str(w.message)]}


@behavior
def progress_bars_of_evaluate_and_predict() -> Any:
    model = dense(keras.optimizers.SGD(0.0))
    x, output = np.zeros((8, 5), "float32"), io.StringIO()
    with contextlib.redirect_stdout(output):
        model.evaluate(x, x[:, :1], verbose=2, callbacks=[MetricAverageCallback()])
        model.predict(x, verbose=2, callbacks=[MetricAverageCallback()])
    return len(output.getvalue().splitlines())
