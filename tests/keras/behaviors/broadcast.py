"""Effects of `BroadcastCallback` on state, files and `fit`."""

from __future__ import annotations

import functools
import zipfile
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers

import ring_plugins as ring
from ring_plugins.keras import (
    BestModelCheckpoint,
    BroadcastCallback,
    DistributedOptimizer,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    broadcast,
    broadcast_variables,
    consistency,
    synchronized_fit,
)
from tests.keras.behaviors import behavior, error_of, fit, logged
from tests.keras.scenarios import BACKEND, dense, features, momentum


@behavior
def state_of_another_root() -> Any:
    """Ranks with different weights start from rank 1's weights and optimizer, and diverge without averaging."""

    def state(model: Any) -> list[Any]:
        return [np.ravel(keras.ops.convert_to_numpy(v)).tolist() for v in [*model.weights, *model.optimizer.variables]]

    class Begins(keras.callbacks.Callback):
        seen: Any = None

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.seen = state(self.model)

    keras.utils.set_random_seed(ring.rank())
    model = keras.Sequential([keras.Input((5,)), layers.BatchNormalization(), layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.1), loss="mse")
    x = np.random.default_rng(ring.rank()).normal(size=(8, 5)).astype("float32")
    model.fit(x, x[:, :1], batch_size=4, epochs=1 + ring.rank(), verbose=0)
    before, begins, log = state(model), Begins(), Path(mkdtemp()) / "log.csv"
    calls = [begins, keras.callbacks.CSVLogger(log), BroadcastCallback(root_rank=1, average_gradients=False)]
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=calls)
    return {"before": before, "begins": begins.seen, "after": state(model)[-2:], "written": log.exists()}


@behavior
def broadcasts_of_what_is_not_built() -> Any:
    """Models that have variables later, and others that have all they will have."""

    class Part(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.built_already = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
            self.later = layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.built_already(self.later(x)[:, :2])

    class NeverCalled(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.one = keras.Sequential([keras.Input((2,)), layers.Dense(1), layers.Dropout(0.5)])

    class Wrapping(NeverCalled):
        def call(self, x: Any) -> Any:
            return self.one(x)

    called = Part()
    called(np.ones((1, 4)))
    lacking = [keras.Sequential([layers.Dense(1), layers.Dropout(0.5)]), Part()]
    rejected = [error_of(functools.partial(broadcast_variables, model)) for model in lacking]
    nothing = [NeverCalled(), Wrapping(), called, keras.Sequential([keras.Input((2,)), layers.Activation("relu")])]
    for model in nothing:
        model.compile(optimizer="adam", loss="mse")
        broadcast_variables(model)
    weights = [keras.ops.convert_to_numpy(weight).tolist() for model in nothing for weight in model.weights]
    return {"rejected": rejected, "weights": weights}


@behavior
def forgotten_broadcast() -> Any:
    """Only metrics are averaged: from different weights, from equal ones, and with an optimizer that averages."""

    def train(seed: int, optimizer: Any, calls: Any) -> Any:
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
        model.compile(optimizer=optimizer, loss="mse")
        with logged() as lines:
            return error_of(lambda: fit(model, calls, steps=2)), [line for line in lines if "average" in line]

    metrics = MetricAverageCallback
    return {
        "different": train(ring.rank(), keras.optimizers.SGD(0.1), [metrics(), LearningRateWarmupCallback()]),
        "equal": train(1, keras.optimizers.SGD(0.0), [metrics()]),
        "averaged": train(1, DistributedOptimizer(keras.optimizers.SGD(0.1)), [metrics()]),
        "not forgotten": train(ring.rank(), keras.optimizers.SGD(0.1), [metrics(), BroadcastCallback()]),
    }


@behavior
def forgotten_broadcast_of_an_own_optimizer() -> Any:
    """The script's own optimizer averages, and nothing broadcasts: what is logged for different and equal weights."""
    texts = []
    for seed in (ring.rank(), 1):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
        model.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        with logged() as lines:
            error = error_of(functools.partial(fit, model, [], steps=3))
        texts.append([*lines, error])
    return texts


@behavior
def weights_that_drift_before_a_checkpoint() -> Any:
    class Drift(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2 and ring.rank() == 1:
                weight = self.model.trainable_variables[0]
                weight.assign(weight + 1.0)

    texts = []
    path = Path(mkdtemp()) / "last.keras"
    for calls in ([Drift()], [Drift(), *([keras.callbacks.ModelCheckpoint(path)] if ring.rank() == 0 else [])]):
        with logged() as lines:
            error = error_of(
                functools.partial(fit, dense(keras.optimizers.SGD(0.1)), [*calls, BroadcastCallback()], steps=3)
            )
        texts.append([*(line for line in lines if "differ" in line), error])
    return texts


@behavior
def drift_in_a_later_step() -> Any:
    """The errors, and the steps taken, where rank 1 changes something after two steps of eight."""

    def disturbed(change: Any) -> Any:
        class Disturb(keras.callbacks.Callback):
            taken = 0

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                self.taken = batch + 1
                if batch == 2 and ring.rank() == 1:
                    change(self.model)

        callback, model = Disturb(), dense(keras.optimizers.Adam(0.1))
        error = error_of(functools.partial(fit, model, [callback, BroadcastCallback()], steps=8))
        return error, callback.taken

    def set_weight(model: Any) -> None:
        model.trainable_variables[0].assign(model.trainable_variables[0] + 1.0)

    def set_option(model: Any) -> None:
        model.optimizer.epsilon = 0.01

    def in_a_loop() -> None:
        model = dense(keras.optimizers.Adam(0.1))
        broadcast_variables(model)
        model.compile(optimizer=DistributedOptimizer(model.optimizer), loss="mse")
        for step in range(8):
            if step == 3 and ring.rank() == 1:
                set_weight(model)
            model.train_on_batch(np.ones((2, 5), "float32"), np.ones((2, 1), "float32"))

    found = {"weight": disturbed(set_weight), "option": disturbed(set_option), "nothing": disturbed(lambda model: None)}
    if keras.backend.backend() != "jax":  # whose compiled steps cannot read variables
        found["loop"] = error_of(in_a_loop), 0
    return found


@behavior
def seeds() -> Any:
    model = keras.Sequential([keras.Input((5,)), layers.Dropout(0.5), layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    state = model.layers[0].seed_generator.state
    before = np.array(keras.ops.convert_to_numpy(state)).tolist()

    class First(keras.callbacks.Callback):
        seen: Any = None

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.seen = np.array(keras.ops.convert_to_numpy(self.model.layers[0].seed_generator.state)).tolist()

    first, second = First(), First()
    fit(model, [first, BroadcastCallback()])
    middle = np.array(keras.ops.convert_to_numpy(state)).tolist()
    fit(model, [second, BroadcastCallback()])
    return {"before": before, "first": first.seen, "middle": middle, "second": second.seen}


@behavior
def dropout_masks() -> Any:
    """With the same global seed and the same data everywhere, ranks still drop different units."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((40,)), layers.Dropout(0.5), layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss=lambda y, p: p)
    x = (2.0 ** -np.arange(40, dtype="float32")).reshape(1, 40)  # the loss shows which units were kept
    fits = [model.fit(x, x[:, :1], verbose=0, callbacks=[BroadcastCallback()]) for _ in range(2)]
    return [fitted.history["loss"][0] for fitted in fits]


class Noise(layers.Layer):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def call(self, x: Any) -> Any:
        return x + self.draw(keras.ops.shape(x))


@behavior
def noise_without_a_seed() -> Any:
    """Losses that are noise, from functions that draw by seeds that the script has set, the same on all ranks."""
    functions = [keras.random.normal]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        functions.append(tf.random.normal)
    found = []
    for function in functions:
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((5,)), Noise(function), layers.Dense(1, kernel_initializer="ones")])
        model.compile(optimizer=keras.optimizers.SGD(0.0), loss=lambda y, p: p, jit_compile=False)
        found.append(fit(model, [BroadcastCallback()]).history["loss"][0])
    return found


@behavior
def moving_statistics() -> Any:
    def train(policy: Any) -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5,)), layers.BatchNormalization(), layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
        x = np.random.default_rng(ring.rank()).normal(size=(16, 5)).astype("float32")
        path = Path(mkdtemp()) / "model.keras"
        calls = [keras.callbacks.ModelCheckpoint(path), BroadcastCallback(moving_statistics=policy)]
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=calls)
        written = keras.saving.load_model(path) if ring.rank() == 0 else model
        return [[value.tolist() for value in m.get_weights()] for m in (model, written)]

    (average, written), (local, _) = train("average"), train("local")
    return {"average": average, "local": local, "written": written}


@behavior
def files() -> Any:
    folder = Path(ring.broadcast_object(mkdtemp()))
    mine = folder / str(ring.rank())
    mine.mkdir()
    model = dense(keras.optimizers.Adam(0.01))
    x, y = features(1, 4)
    writers = [
        keras.callbacks.ModelCheckpoint(mine / "last.keras"),
        BestModelCheckpoint(mine / "best.keras", monitor="loss"),
        keras.callbacks.CSVLogger(mine / "log.csv"),
    ]
    if BACKEND == "tensorflow" and ring.rank() == 1:  # which must not be imported on rank 1
        writers.append(keras.callbacks.TensorBoard(mine / "board", write_graph=False))
    model.fit(x, y, batch_size=4, verbose=2, callbacks=[*writers, BroadcastCallback(), MetricAverageCallback()])
    written = sorted(path.name for path in mine.iterdir())
    ring.barrier()
    with zipfile.ZipFile(folder / "0" / "last.keras") as archive:
        mentions = [name for name in archive.namelist() if name.endswith(".json") and b"ring" in archive.read(name)]
    loaded = keras.saving.load_model(folder / "0" / "last.keras")
    fit(loaded, [BroadcastCallback()])
    return {
        "written": written,
        "mentions": [m for m in mentions if m != "metadata.json"],
        "kind": type(loaded.optimizer).__name__,
    }


@behavior
def backup_that_only_the_root_has() -> Any:
    folder = Path(mkdtemp()) / "backup"
    epochs: list[int] = []

    class Interrupted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            epochs.append(epoch)
            if epoch == 2 and epochs.count(2) == 1:
                raise KeyboardInterrupt

    for _ in range(2):
        keras.utils.set_random_seed(5)
        model = dense(keras.optimizers.Adam(0.01))
        backup = keras.callbacks.BackupAndRestore(folder)
        try:
            fit(model, [backup, Interrupted(), BroadcastCallback()], epochs=4)
        except KeyboardInterrupt:
            ring.barrier()
    return {"epochs": epochs, "weights": [float(np.sum(w)) for w in model.get_weights()]}


@behavior
def fit_that_raises() -> Any:
    """A failed fit must leave nothing behind once its exception has been handled."""

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                raise ValueError("not today")

        on_test_batch_end = on_train_batch_end

    model = dense(momentum(), metrics=["mae"])
    error = error_of(lambda: fit(model, [BroadcastCallback(), MetricAverageCallback(), Fails()]))
    left = [name for name in ("apply", "stateless_apply", "_ring_averaging") if name in vars(model.optimizer)]
    left += [name for name in (MetricAverageCallback._METHOD,) if name in vars(model)]
    left += ["train_function"] if model.train_function is not None else []
    x, y = features(1, 4)
    # The undo of a first fit or evaluation must not affect the second use of a callback.
    again = MetricAverageCallback()
    if BACKEND != "jax":  # on JAX, Keras itself leaves a model without weights if evaluate raises
        error_of(lambda: model.evaluate(x, y, batch_size=4, verbose=0, callbacks=[again, Fails()]))
    left += [f"{name} of evaluate" for name in (MetricAverageCallback._METHOD,) if name in vars(model)]
    if ring.rank() == 1:  # would hang if it still averaged
        model.fit(x, y, batch_size=4, verbose=0)
    apart = model.get_weights()
    fit(model, [BroadcastCallback(), again])
    together = [float(np.sum(value)) for value in model.get_weights()]
    return {"error": error, "left": left, "apart": float(np.sum(apart[0])), "together": together}


class JoinsItself(synchronized_fit.SynchronizedFit):
    """Joins as if others, which know what this rank does, had ended the epoch `ended`; not if that is -1."""

    ended = -1

    def _start(self) -> None:
        super()._start()
        if self.ended >= 0:
            with (
                mock.patch.object(synchronized_fit, "join", return_value=()),
                mock.patch.object(synchronized_fit, "share_state", lambda parts, callbacks, told, *_: told),
            ):
                self._join()

    def _share_state(self, epoch: int, joined: tuple[int, ...]) -> Any:
        return super()._share_state(self.ended, joined)


@behavior
def fits_after_a_join() -> Any:
    """The epochs of a `fit` that all join as if others had ended its first epoch, or all of them, and of later ones."""
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    epochs, callback = [], BroadcastCallback()
    for ended in (0, -1, 2, -1):
        with (
            mock.patch.object(broadcast, "SynchronizedFit", JoinsItself),
            mock.patch.object(JoinsItself, "ended", ended),
        ):
            epochs.append(fit(model, [callback], steps=1, epochs=3).epoch)
    return epochs


@behavior
def first_check_after_a_join() -> Any:
    """When weights are compared in a `fit` that all join before they have taken enough steps for one update."""
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), loss="mse")
    found: list[str] = []
    with (
        mock.patch.object(broadcast, "SynchronizedFit", JoinsItself),
        mock.patch.object(JoinsItself, "ended", 0),
        mock.patch.object(consistency.Weights, "look", lambda _, when, **__: found.append(when)),
        mock.patch.object(consistency, "differing_weights", lambda _, when, *__: found.append(when)),
    ):
        fit(model, [BroadcastCallback()], steps=2, epochs=3)
    return [when for when in found if not when.startswith("after step")]
