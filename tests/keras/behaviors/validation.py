"""Ranks that differ, and models that another library trains in parallel."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers

import ring_plugins as ring
from ring_plugins.core.base import config
from ring_plugins.keras import (
    BroadcastCallback,
    DistributedOptimizer,
    MetricAverageCallback,
    shard,
    undistribute,
    validation,
)
from tests.keras.behaviors import behavior, error_of, fit, logged
from tests.keras.scenarios import BACKEND, dense, features, momentum


@behavior
def one_rank_stops() -> Any:
    class Stops(keras.callbacks.Callback):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.at, self.steps, self.epochs = at, 0, 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if ring.rank() == 1 and self.steps == self.at:
                self.model.stop_training = True

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epochs += 1
            if ring.rank() == 1 and self.at < 0 and epoch == 1:
                self.model.stop_training = True

    in_epoch, at_end = Stops(6), Stops(-1)
    fit(dense(momentum()), [in_epoch, BroadcastCallback()], epochs=5)
    fit(dense(momentum()), [at_end, BroadcastCallback()], epochs=5)
    return {"steps": in_epoch.steps, "epochs": at_end.epochs}


@behavior
def arguments_of_fit_that_differ() -> Any:
    """The errors of numbers of epochs and of validation data that differ; a rate that is NaN on all ranks is equal."""
    model, x, y = dense(momentum()), *features(1, 4)
    given = {"validation_data": (x, y)} if ring.rank() == 0 else {}
    averaging = [MetricAverageCallback(), BroadcastCallback()]
    unknown = [MetricAverageCallback(averaged=["val_loss"]), BroadcastCallback()]
    of_train_step = [MetricAverageCallback(averaged=["extra"]), BroadcastCallback()]
    returning = dense(momentum())
    step = returning.train_step
    vars(returning)["train_step"] = lambda data: {**step(data), "extra": 1.0}
    found = {
        "epochs": error_of(lambda: fit(model, [BroadcastCallback()], epochs=1 + ring.rank())),
        "validation": error_of(lambda: fit(model, averaging, **given)),
        "without metrics": error_of(lambda: fit(model, [BroadcastCallback()], **given)),
        "name": error_of(lambda: fit(model, unknown)),
        "name of train_step": error_of(lambda: fit(returning, of_train_step, validation_data=(x, y))),
    }
    model = dense(keras.optimizers.SGD(float("nan")))
    return {**found, "NaN": error_of(lambda: fit(model, [BroadcastCallback()]))}


@behavior
def rejections() -> Any:
    x, y = features(1, 4)
    rows = 16 if ring.rank() == 0 else 8
    found = {
        "steps": error_of(
            lambda: dense(momentum()).fit(
                x[:rows], y[:rows], batch_size=4, verbose=0, callbacks=[BroadcastCallback(uneven="error")]
            )
        )
    }

    def unequal() -> None:
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4 + ring.rank()), layers.Dense(1)])
        model.compile(optimizer=momentum(), loss="mse")
        fit(model, [BroadcastCallback()])

    found["models"] = error_of(unequal)
    found["root"] = error_of(lambda: fit(dense(momentum()), [BroadcastCallback(root_rank=7)]))
    found["policy"] = error_of(lambda: BroadcastCallback(moving_statistics="sum"))  # type: ignore[arg-type]
    found["optimizer"] = error_of(lambda: DistributedOptimizer("sgd"))  # type: ignore[type-var]
    found["data"] = error_of(lambda: shard(3))

    class Hides(keras.Sequential):
        hides = False

        def train_step(self, *args: Any) -> Any:
            if not self.hides:
                return super().train_step(*args)
            if BACKEND == "jax":
                state, data = args
                return {"loss": 0.0 * data[0].sum()}, state
            return {"loss": 0.0 * keras.ops.sum(args[0][0])}

    model = Hides([keras.Input((5,)), layers.Dense(1)])
    model.compile(optimizer=momentum(), loss="mse")
    fit(model, [BroadcastCallback()])
    model.hides = True  # checked in every fit
    found["no reduction"] = error_of(lambda: fit(model, [BroadcastCallback()]))
    return found


@behavior
def rejection_of_a_strategy() -> Any:
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        model = dense(momentum())
    return error_of(lambda: fit(model, [BroadcastCallback()]))


@behavior
def rejection_of_a_distribution() -> Any:
    model = dense(momentum())
    placed = keras.distribution.distribution
    keras.distribution.distribution = lambda: keras.distribution.DataParallel.__new__(keras.distribution.DataParallel)
    try:
        return error_of(lambda: fit(model, [BroadcastCallback()]))
    finally:
        keras.distribution.distribution = placed


@behavior
def rejection_of_ddp() -> Any:
    model = dense(momentum())
    object.__setattr__(model, "ddp_model", model)
    return error_of(lambda: fit(model, [BroadcastCallback()]))


@behavior
def rates_that_differ() -> Any:
    class Halves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / (1 + ring.rank())

    return error_of(lambda: fit(dense(momentum()), [Halves(), BroadcastCallback()]))


@behavior
def rates_that_differ_later() -> Any:
    """Rates that a script sets between two steps of its own loop: to the same value, and then on one rank only."""
    x, y = features(1, 1)

    def train(one_rank_differs: bool, **options: Any) -> None:
        keras.utils.set_random_seed(0)
        model = dense(DistributedOptimizer(keras.optimizers.SGD(0.1, **options)))
        for step in range(6):
            if step == 2:
                model.optimizer.learning_rate = 0.05
            if step == 4 and one_rank_differs and ring.rank() == 1:
                model.optimizer.learning_rate = 0.01
            model.train_on_batch(x, y)
        model.get_weights()  # JAX computes meanwhile
        undistribute(model.optimizer)

    return {
        "equal": error_of(lambda: train(False)),
        "differs": error_of(lambda: train(True)),
        "differs, accumulating": error_of(lambda: train(True, gradient_accumulation_steps=2)),
    }


class OnGpus:
    """What a backend says on a machine with GPUs."""

    def __init__(self, name: str) -> None:
        self.nccl = {"tensorflow": config.TENSORFLOW_NCCL, "jax": config.JAX_NCCL}.get(name)

    def has_gpus(self) -> bool:
        return True


@behavior
def warnings_of_gpu_copies() -> Any:
    """The warnings of all backends on a machine with GPUs."""

    def text(backend: str, by_nccl: str = "0", is_compressed: bool = False) -> str:
        validation.warn_of_gpu_copies.cache_clear()
        with (
            warnings.catch_warnings(record=True) as caught,
            mock.patch.object(validation, "backend", return_value=OnGpus(backend)),
            mock.patch.object(keras.backend, "backend", return_value=backend),
            mock.patch.dict(os.environ, RING_TENSORFLOW_NCCL=by_nccl, RING_JAX_NCCL=by_nccl),
        ):
            warnings.simplefilter("always")
            validation.warn_of_gpu_copies(ring.rank(), is_compressed)
        validation.warn_of_gpu_copies.cache_clear()
        return " ".join(str(warning.message) for warning in caught)

    found = {backend: text(backend) for backend in ("tensorflow", "torch", "jax")}
    by_nccl = {f"{backend} by NCCL": text(backend, "1") for backend in ("tensorflow", "jax")}
    return {**found, **by_nccl, "compressed": text("jax", "1", is_compressed=True)}


@behavior
def weights_that_a_callback_sets() -> Any:
    """Each rank restores the weights of its own best epoch; with averaged metrics it is the same one."""
    x, y = features(1, 8)
    own = features(1, 4)[0], np.full((16, 1), 3.0 - 6.0 * ring.rank(), "float32")

    def train(*callbacks: Any, **options: Any) -> str:
        keras.utils.set_random_seed(3)
        model = dense(keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True))
        training = {"batch_size": 4, "epochs": 4, "verbose": 0, "validation_data": own, **options}
        return error_of(lambda: model.fit(x, y, callbacks=[*callbacks, BroadcastCallback()], **training))

    class Sets(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            self.model.set_weights([weight + ring.rank() for weight in self.model.get_weights()])

    stopping = {"patience": 9, "restore_best_weights": True}
    with logged() as lines:
        plain = train(keras.callbacks.EarlyStopping("val_loss", patience=9))
    return {
        "restored": train(keras.callbacks.EarlyStopping("val_loss", **stopping)),
        "averaged": train(keras.callbacks.EarlyStopping("val_loss", **stopping), MetricAverageCallback()),
        "set": train(Sets()),
        "moving averages": train(keras.callbacks.SwapEMAWeights(swap_on_epoch=True)),
        "plain": plain,
        "said": [line for line in lines if "decided differently" in line],
    }


@behavior
def unequal_steps_of_a_generator() -> Any:
    """The length is not known in advance; the mismatch is detected when one rank's epoch is over."""

    def batches(steps: int) -> Any:
        for _ in range(steps):
            yield np.ones((4, 5), "float32"), np.ones((4, 1), "float32")

    def train(steps: int, *callbacks: Any) -> str:
        model = keras.Sequential([keras.Input((5,)), layers.BatchNormalization(), layers.Dense(1)])
        model.compile(optimizer=momentum(), loss="mse")
        return error_of(lambda: model.fit(batches(steps), verbose=0, callbacks=callbacks))

    return [
        train(3 + ring.rank(), BroadcastCallback(uneven="error")),
        train(4 - ring.rank(), MetricAverageCallback(), BroadcastCallback(uneven="error")),
        train(3 + ring.rank(), BroadcastCallback(uneven="error", synchronized_batch_norm=True)),
    ]
