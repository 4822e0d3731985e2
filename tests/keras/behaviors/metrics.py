"""Metrics on all ranks' data."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback, MetricAverageCallback
from tests.keras.behaviors import behavior, error_of
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


class Positives(keras.metrics.Metric):
    """A sum whose `result` shows its variable in one of many ways."""

    def __init__(self, name: str, show: Callable[[Any], Any]) -> None:
        super().__init__(name=name)
        self.found, self.show = self.add_variable((2,), "zeros", name="found"), show

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.found.assign(self.found + keras.ops.sum(y_true) * keras.ops.ones(2))

    def result(self) -> Any:
        return self.show(self.found)


@behavior
def results_that_are_variables() -> Any:
    """Metrics of two ranks, of which rank 0 has 8 positives and rank 1 has 24."""
    ways: dict[str, Callable[[Any], Any]] = {
        # JAX traces `result` and takes no variable from it.
        "variable": lambda found: found if keras.backend.backend() != "jax" else found.value,
        "value": lambda found: found.value,
        "tensor": keras.ops.convert_to_tensor,
        "view": lambda found: keras.ops.reshape(found.value, (2, 1)),
        # Other backends trace `result`.
        "array": keras.ops.convert_to_numpy if keras.backend.backend() == "torch" else lambda found: found.value,
        "named": lambda found: {"one": found.value, "other": found[0]},
        "averaged": lambda found: found.value,
        "averagednamed": lambda found: {"half": found.value, "quarter": found[0] / 2},
    }
    metrics = [Positives(name, show) for name, show in ways.items()]
    metrics.append(keras.metrics.TruePositives(name="true"))
    metrics.append(keras.metrics.TruePositives(thresholds=[0.2, 0.4], name="thresholds"))
    model = keras.Sequential([keras.Input((1,)), layers.Identity()])
    model.compile(loss="mse", metrics=metrics)
    y = np.ones((8, 1) if ring.rank() == 0 else (24, 1), "float32")
    callback = MetricAverageCallback(averaged=["averaged", "averagednamed"])
    logs = model.evaluate(y, y, verbose=0, return_dict=True, callbacks=[callback])
    del logs["loss"]
    left = [metric.name for metric in metrics if "result" in vars(metric)]
    # Nothing is tried of metrics that the script itself calls no sums.
    left += [one.name for one, trial in callback._trials.items() if one.name in callback.averaged and trial._found]
    return {name: np.ravel(keras.ops.convert_to_numpy(value)).tolist() for name, value in logs.items()}, left


@behavior
def progress_bars_of_evaluate_and_predict() -> Any:
    model = dense(keras.optimizers.SGD(0.0))
    x, output = np.zeros((8, 5), "float32"), io.StringIO()
    with contextlib.redirect_stdout(output):
        model.evaluate(x, x[:, :1], verbose=2, callbacks=[MetricAverageCallback()])
        model.predict(x, verbose=2, callbacks=[MetricAverageCallback()])
    return len(output.getvalue().splitlines())


@behavior
def invalid_names_of_metrics() -> Any:
    names: tuple[Any, ...] = "loss", [3]
    return [error_of(lambda given=given: MetricAverageCallback(given)) for given in names]


class Own(keras.metrics.Metric):
    """Metrics of a user's own, with some numbers of state."""

    initial, begin = 0.0, 0.0

    def __init__(self, count: int = 2) -> None:
        super().__init__(name=type(self).__name__.lower())
        initial = keras.initializers.Constant(self.initial)
        self.numbers = [self.add_variable((), initializer=initial, name=f"number{i}") for i in range(count)]
        self.calls = 0

    def reset_state(self) -> None:
        for number in self.numbers:
            number.assign(self.begin)

    def result(self) -> Any:
        return self.numbers[0] / (self.numbers[1] + 1e-9)


class MeanError(Own):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.calls += 1
        np.random.random()
        self.numbers[0].assign_add(keras.ops.sum(keras.ops.abs(y_true - y_pred)))
        self.numbers[1].assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))


class Smoothed(MeanError):
    """Begins with zero, not one, in the first epoch on TensorFlow, where Keras resets nothing before it."""

    begin = 1.0


class NeverReset(MeanError):
    initial = 3.0

    def reset_state(self) -> None:
        pass


class ErrorOfParts(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="errorofparts")
        self.part = keras.metrics.MeanSquaredError()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.part.update_state(y_true, y_pred)

    def reset_state(self) -> None:
        self.part.reset_state()

    def result(self) -> Any:
        return keras.ops.sqrt(self.part.result())


class Last(Own):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        for number in self.numbers:
            number.assign(keras.ops.mean(y_true))


class MovingAverage(Own):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        for number in self.numbers:
            number.assign(0.5 * number + 0.5 * keras.ops.mean(y_true))


class HalfSum(Own):
    """One number is a sum, and the other a maximum, found in a helper."""

    def larger(self, values: Any) -> Any:
        return keras.ops.maximum(self.numbers[1], keras.ops.max(values))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.numbers[0].assign_add(keras.ops.sum(y_true))
        self.numbers[1].assign(self.larger(keras.ops.abs(y_true)))


class BesideLarge(Own):
    """A moving average, whose numbers are tiny beside those of a sum."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.numbers[0].assign(0.5 * self.numbers[0] + 0.5 * keras.ops.mean(y_true))
        self.numbers[1].assign_add(2e9)


class Lowest(Own):
    """A minimum, which data from zero on never change, beside a sum."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.numbers[0].assign(keras.ops.minimum(self.numbers[0], keras.ops.min(y_true)))
        self.numbers[1].assign_add(1.0)


class AboveThreshold(Own):
    """A share above a number of the state that no update changes."""

    def __init__(self) -> None:
        super().__init__(3)

    def reset_state(self) -> None:
        super().reset_state()
        self.numbers[2].assign(0.25)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.numbers[0].assign_add(keras.ops.sum(keras.ops.cast(y_true > self.numbers[2], "float32")))
        self.numbers[1].assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self) -> Any:
        return super().result() + self.numbers[2]


class SumOfLarge(Own):
    """A sum that only data far above one change."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.numbers[0].assign_add(keras.ops.sum(keras.ops.where(keras.ops.abs(y_true) > 2.0, 1.0, 0.0)))
        self.numbers[1].assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))


@behavior
def metrics_of_own_classes() -> Any:
    """The metrics of two epochs on all data, and on parts, where some of them are no sums."""
    import warnings

    random = np.random.default_rng(1)
    x, y = random.normal(size=(32, 5)).astype("float32"), random.normal(size=(32, 1)).astype("float32")

    def train(x: Any, y: Any, batch_size: int, *callbacks: Any) -> Any:
        sums = MeanError, Smoothed, NeverReset, ErrorOfParts, AboveThreshold, SumOfLarge
        others = Last, MovingAverage, HalfSum, BesideLarge, Lowest
        metrics: list[Any] = [kind() for kind in (*sums, *others)]
        keras.utils.set_random_seed(2)
        model = dense(keras.optimizers.SGD(0.0), metrics=metrics)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options: Any = {"batch_size": batch_size, "epochs": 2, "verbose": 0, "shuffle": False}
            history = model.fit(x, y, callbacks=[*callbacks], **options).history
        said = [str(warning.message) for warning in caught if "is not a sum" in str(warning.message)]
        left = [metric.name for metric in metrics if {"update_state", "reset_state"} & {*vars(metric)}]
        values = {f"{name} {epoch}": value for name, of in history.items() for epoch, value in enumerate(of)}
        seen = {"history": values, "said": said, "left": left}
        return {**seen, "calls": metrics[0].calls, "random": np.random.random()}

    parts = [array.reshape(4, 2, 4, -1)[:, ring.rank()].reshape(16, -1) for array in (x, y)]
    return train(x, y, 8), train(*parts, 4, BroadcastCallback(), MetricAverageCallback())
