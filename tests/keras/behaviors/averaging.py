"""Optimizers in other cases than an ordinary `fit`: custom loops, several optimizers, overflows."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import keras
import numpy as np
from keras import layers

import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback, DistributedOptimizer, broadcast_variables, undistribute
from ring_plugins.keras.averaging import averaging_of
from tests.keras.behaviors import behavior, error_of, fit
from tests.keras.scenarios import BACKEND, Run, dense, features


@behavior
def accumulation_is_reduced_once_an_update() -> Any:
    model = dense(DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)))
    fit(model, [BroadcastCallback()], steps=6)
    averaging = averaging_of(model.optimizer)
    assert averaging is not None
    return {"updates": averaging.passes, "weights": [float(np.sum(value)) for value in model.get_weights()]}


@behavior
def trial_of_overlap() -> Any:
    model = dense(keras.optimizers.SGD(0.1))
    found = {}
    for overlap in ("auto", True):
        DistributedOptimizer(model.optimizer, overlap=overlap)
        averaging = averaging_of(model.optimizer)
        assert averaging is not None
        averaging.prepare(model.trainable_variables)
        exchange: Any = averaging.exchange
        way = exchange.buckets.reducer._overlap
        found[str(overlap)] = {"tries": not way.finished, "overlaps": way.now}
        undistribute(model.optimizer)
    return found


@behavior
def wrapped_after_a_step() -> Any:
    """Steps that are compiled already; `undistribute` between two of them, too."""
    keras.utils.set_random_seed(0)
    model = dense(keras.optimizers.SGD(0.1))
    x = np.full((4, 5), ring.rank() + 1.0, "float32")
    model.train_on_batch(x * 0, x[:, :1] * 0)
    spreads = []
    for wrap in (DistributedOptimizer, undistribute, DistributedOptimizer):
        wrap(model.optimizer)
        model.train_on_batch(x, x[:, :1])
        rows = np.array(ring.all_gather_object([float(np.sum(value)) for value in model.get_weights()]))
        spreads.append(bool(np.ptp(rows, axis=0).max() > 0))
        broadcast_variables(model)
    return spreads


@behavior
def own_function_called_before_wrapping() -> Any:
    """A compiled function of the script's that has made an update already."""
    keras.utils.set_random_seed(0)
    model, optimizer = dense(keras.optimizers.SGD(0.1)), keras.optimizers.SGD(0.1)
    x = np.full((4, 5), ring.rank() + 1.0, "float32")
    step = _compiled_step(model, optimizer)
    step(x * 0)
    broadcast_variables(model)
    error = error_of(lambda: DistributedOptimizer(optimizer))
    if error != "none":  # a new one averages
        del step
        step = _compiled_step(model, DistributedOptimizer(optimizer))
    step(x)
    rows = np.array(ring.all_gather_object([float(np.sum(value)) for value in model.get_weights()]))
    return {"spread": float(np.ptp(rows, axis=0).max()), "error": error}


def _compiled_step(model: Any, optimizer: Any) -> Any:
    """A function that makes an update, compiled by the framework."""
    weights = model.trainable_variables
    optimizer.build(weights)
    if BACKEND == "jax":
        import jax

        def loss(values: Any, x: Any) -> Any:
            return keras.ops.mean(keras.ops.square(model.stateless_call(values, [], x)[0]))

        @jax.jit
        def update(values: Any, state: Any, x: Any) -> Any:
            return optimizer.stateless_apply(state, jax.grad(loss)(values, x), values)

        def step(x: Any) -> None:
            values = [variable.value for variable in weights]
            found, _ = update(values, [variable.value for variable in optimizer.variables], x)
            for variable, value in zip(weights, found, strict=True):
                variable.assign(value)

        return step
    if BACKEND == "torch":
        import torch

        def backward(x: Any) -> None:
            model.zero_grad()
            keras.ops.mean(keras.ops.square(model(torch.as_tensor(x)))).backward()
            with torch.no_grad():
                optimizer.apply([variable.value.grad for variable in weights], weights)

        return torch.compile(backward, backend="eager")
    import tensorflow as tf

    @tf.function
    def traced(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        optimizer.apply(tape.gradient(loss, weights), weights)

    return traced


@behavior
def overflow_on_one_rank() -> Any:
    keras.utils.set_random_seed(0)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=16.0)
    model = dense(optimizer)
    before = [value.tolist() for value in model.get_weights()]
    x = np.ones((4, 5), "float32")
    if ring.rank() == 1:
        x[:] = np.inf
    model.fit(x, x[:, :1] * 0, batch_size=4, verbose=0, callbacks=[BroadcastCallback()])
    after = [value.tolist() for value in model.get_weights()]
    scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
    return {"unchanged": before == after, "scale": scale}


@behavior
def adversarial_training() -> Any:
    """Two optimizers in one train_step: one process on all data, and both ranks on their parts."""
    outcomes = [_adversarial(Run(0, 1, ring.size())), _adversarial(Run(ring.rank(), ring.size(), ring.size()))]
    return {"alone": outcomes[0], "together": outcomes[1]}


def _adversarial(run: Run) -> Any:
    run.seed()
    model = Adversarial()
    model.compile(loss="mse")  # makes an RMSprop for all weights, which train_step does not use
    run.fit(model, *features(run.ranks))
    return [value.tolist() for value in model.get_weights()]


class Adversarial(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = layers.Dense(5), layers.Dense(1)
        self.maker.build((None, 5))
        self.judge.build((None, 5))
        self.built = True
        self.maker_optimizer = keras.optimizers.Adam(0.01)
        self.judge_optimizer = keras.optimizers.SGD(0.05, momentum=0.9)

    def call(self, x: Any) -> Any:
        return self.judge(self.maker(x))

    def judge_loss(self, x: Any) -> Any:
        return keras.ops.mean(self.judge(x)) - keras.ops.mean(self.judge(self.maker(x))) + 0.1 * self.size()

    def size(self) -> Any:
        return sum(keras.ops.sum(keras.ops.square(w)) for w in self.judge.trainable_weights)

    def maker_loss(self, x: Any) -> Any:
        return keras.ops.mean(keras.ops.square(self.judge(self.maker(x)) - 1.0))

    def train_step(self, data: Any) -> Any:
        x = data[0]
        for loss, part, optimizer in (
            (self.judge_loss, self.judge, self.judge_optimizer),
            (self.maker_loss, self.maker, self.maker_optimizer),
        ):
            if BACKEND == "tensorflow":
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    value = loss(x)
                gradients = tape.gradient(value, part.trainable_weights)
                optimizer.apply_gradients(zip(gradients, part.trainable_weights, strict=True))
            else:
                import torch

                self.zero_grad()
                value = loss(x)
                value.backward()
                with torch.no_grad():
                    optimizer.apply([w.value.grad for w in part.trainable_weights], part.trainable_weights)
        return {"loss": value}


@behavior
def two_optimizers_in_one_compiled_step() -> Any:
    """The updates are independent, but their collectives must run in the same order on all ranks."""
    import jax

    parts = [layers.Dense(64), layers.Dense(1)]
    optimizers = [DistributedOptimizer(keras.optimizers.SGD(0.1)) for _ in parts]
    for part, optimizer, width in zip(parts, optimizers, (300, 64), strict=True):
        part.build((None, width))
        optimizer.build(part.trainable_variables)
        DistributedOptimizer(optimizer)
        for variable in part.trainable_variables:
            variable.assign(variable * 0 + 0.5)

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        updated = []
        for optimizer, (weights, variables) in zip(optimizers, state, strict=True):
            gradients = jax.grad(lambda w: (x[:, : w[0].shape[0]] @ w[0] + w[1]).mean())(weights)
            updated.append(optimizer.stateless_apply(variables, gradients, weights))
        return updated

    state = [
        ([v.value for v in part.trainable_variables], [v.value for v in optimizer.variables])
        for part, optimizer in zip(parts, optimizers, strict=True)
    ]
    for _ in range(20):
        state = step(state, np.full((4, 300), 1.0 + ring.rank(), "float32"))
    bias = 0.5 - 20 * 0.1
    mean = np.mean([1.0 + rank for rank in range(ring.size())])
    return {
        "found": [float(np.mean(value)) for weights, _ in state for value in weights],
        "expected": [0.5 - 2.0 * mean / 64, 0.5 - 2.0 / 64, 0.5 - 2.0 * mean, bias],
    }


@behavior
def own_compiled_step() -> Any:
    """What TensorFlow says while it traces a step of the script's own, and whether it keeps the communicator."""
    import tensorflow as tf

    def trained() -> tuple[list[str], list[float], Any]:
        layer = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        layer.build((None, 5))
        optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build(layer.trainable_weights)

        @tf.function
        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(layer(x))
            optimizer.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)

        said = list[str]()
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        tf.get_logger().addHandler(handler)
        step(np.full((4, 5), 1.0 + ring.rank(), "float32"))
        tf.get_logger().removeHandler(handler)
        weights, averaging = np.ravel(layer.get_weights()[0]).tolist(), averaging_of(optimizer)
        assert averaging is not None and averaging.exchange is not None
        return said, weights, weakref.ref(averaging.exchange.communicator)

    said, weights, communicator = trained()
    gc.collect()
    return [said, weights, communicator() is not None]


@behavior
def eager_fit() -> Any:
    """Fit eagerly with an optimizer that averages, without `BroadcastCallback`; returns errors and weights."""
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1, kernel_initializer="zeros")])
    model.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", run_eagerly=True)
    x = np.full((8, 5), 1.0 + ring.rank(), "float32")
    error = error_of(lambda: model.fit(x, x[:, :1], batch_size=2, verbose=0))
    return error, np.ravel(model.get_weights()[0]).tolist() if error == "none" else []


@behavior
def own_loop() -> Any:
    """A loop without fit must equal the mean of both ranks' gradients, computed by hand."""
    x = np.full((4, 5), 1.0 + ring.rank(), "float32")
    layer = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    layer.build((None, 5))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
    for _ in range(2):
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(layer(x))
            optimizer.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)
        elif BACKEND == "torch":
            import torch

            layer.zero_grad()
            layer(torch.from_numpy(x)).mean().backward()
            with torch.no_grad():
                optimizer.apply([w.value.grad for w in layer.trainable_weights], layer.trainable_weights)
        else:
            import jax

            gradient = jax.grad(lambda w: (x @ w).mean())(layer.kernel.value)
            optimizer.apply([gradient], layer.trainable_weights)
    mean = np.mean([1.0 + rank for rank in range(ring.size())])
    return {"found": np.ravel(layer.get_weights()[0]).tolist(), "expected": [-0.1 * 2 * mean] * 5}


@behavior
def gradient_on_one_rank_only() -> Any:
    variables = [keras.Variable(np.ones(3, "float32")), keras.Variable(np.ones(2, "float32"))]
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(variables)
    first, second = (keras.ops.convert_to_tensor(np.ones(n, "float32")) for n in (3, 2))
    return error_of(lambda: optimizer.apply([first, second if ring.rank() else None], variables))


@behavior
def gradients_from_elsewhere() -> Any:
    """torch.autograd.grad calls no hooks; its gradients are averaged when they are applied."""
    import torch

    x = torch.full((4, 5), 1.0 + ring.rank())
    layer = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    layer.build((None, 5))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
    for _ in range(2):
        gradients = torch.autograd.grad(layer(x).mean(), [w.value for w in layer.trainable_weights])
        with torch.no_grad():
            optimizer.apply(list(gradients), layer.trainable_weights)
    return np.ravel(layer.get_weights()[0]).tolist()


@behavior
def gradients_changed_after_backward() -> Any:
    """Half of the variables get half their gradient, the others all of it, in two calls of one optimizer."""
    import torch

    x = torch.full((4, 5), 1.0 + ring.rank())
    layer = layers.Dense(1, kernel_initializer="zeros")
    layer.build((None, 5))
    kernel, bias = layer.trainable_weights
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([kernel, bias])
    for _ in range(2):
        kernel.value.grad = bias.value.grad = None
        layer(x).mean().backward()
        with torch.no_grad():
            optimizer.apply([kernel.value.grad * 0.5], [kernel])
            optimizer.apply([bias.value.grad], [bias])
    weights = [np.ravel(weight).tolist() for weight in layer.get_weights()]
    return {"weights": weights, "gradients": [np.ravel(v.value.grad).tolist() for v in (kernel, bias)]}


@behavior
def gradients_of_frozen_variables() -> Any:
    """What the caller computes for variables that are not trained is averaged too."""
    import torch

    variables = [keras.Variable(np.zeros(3, "float32"), trainable=trainable) for trainable in (True, False)]
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.apply([torch.full((3,), 1.0 + ring.rank())] * 2, variables)
    frozen = variables[1].value
    return {"values": [np.ravel(v.numpy()).tolist() for v in variables], "is_frozen": not frozen.requires_grad}


@behavior
def inside_xla() -> Any:
    """XLA cannot compile host calls: custom loops get an error, and fit continues without XLA."""
    import tensorflow as tf

    layer = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    layer.build((None, 5))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x))
        optimizer.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)
        return loss

    x = tf.fill((4, 5), 1.0 + ring.rank())
    rejected = error_of(lambda: tf.function(step, jit_compile=True)(x))
    nested = error_of(lambda: tf.function(lambda x: 2.0 * tf.function(step, autograph=False)(x), jit_compile=True)(x))
    tf.function(step)(x)  # the ranks are still synchronized
    import warnings

    model = Adversarial()
    model.compile(loss="mse", optimizer=None, jit_compile=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, [BroadcastCallback()])
    return {
        "rejected": rejected, "nested": nested, "found": np.ravel(layer.get_weights()[0]).tolist(),
        "said": [str(w.message) for w in caught if "without XLA" in str(w.message)],
        "weights": [value.tolist() for value in model.get_weights()],
    }  # fmt: skip
