"""Learning rates set by the callbacks."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import keras
import numpy as np
from keras import layers

import ring_plugins as ring
from ring_plugins.core import functions
from ring_plugins.keras import (
    BroadcastCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from tests.keras.behaviors import behavior, error_of, fit, logged
from tests.keras.scenarios import dense, momentum


class Rates(keras.callbacks.Callback):
    """Records the rate of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


@behavior
def warm_up() -> Any:
    model, rates = dense(keras.optimizers.SGD(0.1, momentum=0.9)), Rates()
    warm = LearningRateWarmupCallback(warmup_epochs=2)
    schedule = LearningRateScheduleCallback(0.1, start_epoch=3)
    fit(model, [warm, schedule, rates, BroadcastCallback()], epochs=4)
    again = Rates()
    fit(model, [LearningRateWarmupCallback(warmup_epochs=1), again, BroadcastCallback()], epochs=2)
    return {"rates": rates.seen, "again": again.seen}


@behavior
def warm_up_of_a_schedule() -> Any:
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)
    model, rates = dense(keras.optimizers.SGD(decay)), Rates()
    fit(model, [LearningRateWarmupCallback(warmup_epochs=1), rates, BroadcastCallback()], epochs=2)
    # Rates are read after the update, which has increased the number of iterations.
    multipliers = [min(1 + step / 4, 2.0) for step in range(1, 9)]
    expected = [0.1 * 0.5 ** (step / 4) * m for step, m in zip(range(1, 9), multipliers, strict=True)]
    return {"rates": rates.seen, "expected": expected}


@behavior
def two_callbacks_on_a_schedule() -> Any:
    """Both multiply, and neither does after fit."""
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)
    model, rates = dense(keras.optimizers.SGD(decay)), Rates()
    calls = [LearningRateWarmupCallback(warmup_epochs=0), LearningRateScheduleCallback(0.1, start_epoch=1), rates]
    fit(model, [*calls, BroadcastCallback()], epochs=2)
    after = Rates()
    fit(model, [after, BroadcastCallback()])
    expected = [0.1 * 0.5 ** (step / 4) for step in range(1, 13)]
    return {"rates": rates.seen, "after": after.seen, "expected": expected}


@behavior
def wrong_arguments() -> Any:
    """The errors of arguments that are no numbers, and of a multiplier that returns none."""
    given = [{"multiplier": value} for value in (None, "x", -1.0, float("nan"), True)]
    given += [{"multiplier": 1.0, "start_epoch": "1"}, {"multiplier": 1.0, "steps_per_epoch": "4"}]
    given += [{"multiplier": 1.0, "initial_learning_rate": value} for value in (-0.1, "0.1", float("inf"))]
    found = [error_of(lambda options=options: LearningRateScheduleCallback(**options)) for options in given]
    found.append(error_of(lambda: LearningRateWarmupCallback(warmup_epochs=None)))
    calls = [LearningRateScheduleCallback(lambda epoch: None), BroadcastCallback()]
    return [*found, error_of(lambda: fit(dense(keras.optimizers.SGD(0.1)), calls))]


@behavior
def resumed_schedules() -> Any:
    """What is said of schedules that go on in epoch 3 of 4 steps each, after as many steps, twice as many and none."""
    said = []
    for steps in (8, 16, 0):
        model = dense(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)))
        model.optimizer.iterations.assign(steps)
        with logged() as lines:
            fit(model, [BroadcastCallback()], initial_epoch=2, epochs=3)
        said.append([line for line in lines if "ExponentialDecay" in line])
    return said


@behavior
def effective_rate() -> Any:
    """What rank 0 says about the rate, before and after the script has read `size()`."""
    texts = []
    functions._was_size_asked = False  # the harness asks
    for _ in range(2):
        with logged() as lines:
            calls = [LearningRateWarmupCallback(warmup_epochs=1), BroadcastCallback()]
            fit(dense(keras.optimizers.SGD(0.1)), calls, epochs=2)
        texts.append([line for line in lines if "rate" in line])
        ring.size()
    return texts


@behavior
def warm_up_then_plateau() -> Any:
    model, rates = dense(keras.optimizers.SGD(1e-7)), Rates()
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=10.0, min_lr=0)
    calls = [LearningRateWarmupCallback(warmup_epochs=1), plateau, rates, BroadcastCallback(), MetricAverageCallback()]
    fit(model, calls, epochs=5)
    return [rate / 1e-7 for rate in rates.seen[3::4]]


@behavior
def warm_up_resumed() -> Any:
    """A model that was saved during warm-up resumes with its rate."""
    path = Path(mkdtemp()) / "model.keras"
    model = dense(keras.optimizers.SGD(0.1))
    fit(model, [LearningRateWarmupCallback(warmup_epochs=4), BroadcastCallback()], epochs=2)
    model.save(path)
    loaded, rates = keras.saving.load_model(path), Rates()
    fit(loaded, [LearningRateWarmupCallback(warmup_epochs=4), rates, BroadcastCallback()], initial_epoch=2, epochs=5)
    return rates.seen


@behavior
def rates_for_one_process() -> Any:
    """The rates of the job after fits that begin with a rate from elsewhere, and those in files."""
    path = Path(mkdtemp()) / "model.keras"
    model = dense(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=1.0))
    optimizer = model.optimizer.inner_optimizer

    def train(model: Any, *callbacks: Any, **options: Any) -> float:
        warm = LearningRateWarmupCallback(warmup_epochs=1)
        fit(model, [*callbacks, warm, BroadcastCallback(), MetricAverageCallback()], **{"epochs": 2, **options})
        return read(model)

    def read(model: Any) -> float:
        return float(keras.ops.convert_to_numpy(getattr(model.optimizer, "inner_optimizer", None).learning_rate))

    def velocity(model: Any) -> float:
        return float(np.sum(keras.ops.convert_to_numpy(model.optimizer.inner_optimizer.momentums[0])))

    in_fit = {}
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: in_fit.update({epoch: velocity(model)}))
    found = {"first": train(model), "second": train(model, note)}
    model.save(path)
    loaded = keras.saving.load_model(path)
    found |= {"kept": read(model), "file": read(loaded), "velocities": in_fit[1] / velocity(loaded)}
    found["velocities after fit"] = velocity(model) / velocity(loaded)
    found |= {"loaded": train(loaded), "resumed": train(keras.saving.load_model(path), initial_epoch=4, epochs=5)}
    optimizer.learning_rate = 0.05
    found["set"] = train(model)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=1e9, min_lr=0)
    found |= {"plateau": train(model, plateau), "after plateau": train(model)}
    other = dense(keras.optimizers.SGD.from_config(optimizer.get_config()))
    return {**found, "copied": float(keras.ops.convert_to_numpy(other.optimizer.learning_rate))}


@behavior
def rates_between_fits() -> Any:
    """The rate of the job in a fit that follows on one whose last rate is equal to the new one, or was not used up."""
    model = dense(keras.optimizers.SGD(0.1, momentum=0.9))

    def train(model: Any, *more: Any, **options: Any) -> float:
        rates = Rates()
        warm = LearningRateWarmupCallback(warmup_epochs=0)
        fit(model, [*more, rates, warm, BroadcastCallback(), MetricAverageCallback()], **options)
        return rates.seen[-1]

    def read(model: Any) -> float:
        return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))

    def variable(model: Any) -> float:
        return float(keras.ops.convert_to_numpy(model.optimizer._learning_rate))

    found = {"fit": train(model), "read": read(model), "variable": variable(model)}
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=1e9, min_lr=0)
    found |= {"before reduction": train(model, plateau, epochs=2), "reduced": read(model), "halved": variable(model)}
    model.optimizer.learning_rate = 0.1  # to which the job's rate was reduced
    found |= {"set": read(model), "after set": train(model)}
    model.optimizer.learning_rate.assign(0.2)
    found["after assign"] = train(model)
    weights = Path(mkdtemp()) / "model.weights.h5"
    other = dense(keras.optimizers.SGD(0.4, momentum=0.9))
    other.optimizer.build(other.trainable_variables)
    other.save_weights(weights)
    model.load_weights(weights)
    found |= {"loaded": read(model), "after load": train(model)}
    for copy, value in zip(other.optimizer.variables, model.optimizer.variables, strict=True):
        copy.assign(value)
    found |= {"copied": read(other), "after copy": train(other)}
    rates = Rates()
    fit(other, [rates, BroadcastCallback()])
    found["without warm-up"] = rates.seen[0]

    def interrupt(batch: int, logs: Any) -> None:
        raise ZeroDivisionError(batch)

    interrupted = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    try:
        train(model, interrupted)
    except ZeroDivisionError as error:
        kept = error  # and its frames
        model.optimizer.learning_rate = 0.05
        found["after an exception"] = train(model)
        del kept, error
    with logged() as lines:
        model.optimizer.learning_rate = 0.5 * read(model)
        train(model)
    found["said"] = sum("the script has read its rate, 0.1, and has set another" in line for line in lines)
    return found


@behavior
def multiples_in_a_range_of_epochs() -> Any:
    """Square-root scaling, and a multiplier that follows the fraction of an epoch."""
    rates, log = Rates(), Path(mkdtemp()) / "log.csv"
    halves = LearningRateScheduleCallback(lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=2, staircase=False)
    calls = [LearningRateWarmupCallback(warmup_epochs=0, scaling="sqrt"), halves, rates, keras.callbacks.CSVLogger(log)]
    fit(dense(momentum()), [*calls, BroadcastCallback(write_on_root_only=False)], epochs=3)
    return {"rates": rates.seen, "written": log.exists()}


@behavior
def momentum_correction() -> Any:
    """One step with a velocity at rate 0.1, the next at 0.2: by hand and by callback."""
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.5), loss=lambda y, p: p)
    x = np.ones((4, 1), "float32")
    calls = [LearningRateWarmupCallback(warmup_epochs=0.25), BroadcastCallback()]
    model.fit(x, x, batch_size=1, epochs=1, verbose=0, callbacks=calls)
    weight, velocity, rate = 1.0, 0.0, 0.1
    for new in (0.1, 0.2, 0.2, 0.2):  # the gradient is 1 in every step
        velocity, rate = 0.5 * velocity * (new / rate) - new, new
        weight += velocity
    return {"found": float(model.get_weights()[0][0, 0]), "expected": weight}
