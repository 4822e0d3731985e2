"""Scenarios: trainings that must have equal results on several ranks and in one process on the same batches.

A scenario is a function of a `Run` that trains and returns the values to compare. The worker calls it once as a single
process that trains on whole batches, and once as one of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers

import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback, DistributedOptimizer, SyncBatchNormalization, undistribute

Outcome = dict[str, Any]
BACKEND = keras.backend.backend()


@dataclass
class Run:
    """One run of a scenario: as a single process (rank 0 of 1), or as one of the ranks."""

    rank: int
    size: int
    ranks: int

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def seed(self) -> None:
        """Every rank initializes different weights; rank 0's equal those of the single process."""
        keras.utils.set_random_seed(self.rank)

    def share(self, array: np.ndarray, batch: int) -> np.ndarray:
        """This rank's rows of every batch of `batch * ranks` rows."""
        rows = array.reshape(-1, self.ranks, batch, *array.shape[1:])
        return rows.reshape(array.shape) if self.is_alone else rows[:, self.rank].reshape(-1, *array.shape[1:])

    def fit(self, model: Any, x: Any, y: Any, batch: int = 4, callbacks: Any = None, **options: Any) -> Any:
        share = lambda tree: keras.tree.map_structure(lambda a: self.share(a, batch), tree)  # noqa: E731
        if "sample_weight" in options:
            options["sample_weight"] = share(options["sample_weight"])
        options = {"epochs": 2, "shuffle": False, "verbose": 0, **options}
        callbacks = [BroadcastCallback()] if callbacks is None else callbacks
        return model.fit(
            share(x), share(y), batch_size=batch * (self.ranks if self.is_alone else 1),
            callbacks=[] if self.is_alone else callbacks, **options,
        )  # fmt: skip


Scenario = Callable[[Run], Outcome]

SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Register a scenario by its name; `test_equality.py` lists its backends."""
    SCENARIOS[function.__name__] = function
    return function


def images(ranks: int, steps: int = 3, batch: int = 4) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    count = steps * batch * ranks
    return random.normal(size=(count, 6, 6, 1)).astype("float32"), random.integers(0, 3, count)


def features(ranks: int, steps: int = 3, batch: int = 4) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    count = steps * batch * ranks
    return random.normal(size=(count, 5)).astype("float32"), random.normal(size=(count, 1)).astype("float32")


def weights(model: Any) -> Outcome:
    found = {f"weight {i}": value for i, value in enumerate(model.get_weights())}
    # The number of iterations is omitted, because it would dominate the norm.
    state = [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables if v is not model.optimizer.iterations]
    return found | {f"state {i}": np.array(value) for i, value in enumerate(state)}


def dense(optimizer: Any, **options: Any) -> Any:
    model = keras.Sequential([keras.Input((5,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def momentum() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def small_steps() -> Any:
    """An optimizer for models that amplify rounding errors."""
    return keras.optimizers.SGD(0.01, momentum=0.9)


# Optimizers --------------------------------------------------------------------------------------------


@scenario
def convolution_with_momentum(run: Run) -> Outcome:
    run.seed()
    model = keras.Sequential(
        [keras.Input((6, 6, 1)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(3)]
    )
    model.compile(optimizer=momentum(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    run.fit(model, *images(run.ranks))
    return weights(model)


@scenario
def adam(run: Run) -> Outcome:
    run.seed()
    model = dense(keras.optimizers.Adam(0.01))
    run.fit(model, *features(run.ranks))
    return weights(model)


@scenario
def many_buckets(run: Run) -> Outcome:
    run.seed()
    model = keras.Sequential(
        [keras.Input((5,)), *(layers.Dense(7, activation="tanh") for _ in range(6)), layers.Dense(1)]
    )
    model.compile(optimizer=momentum(), loss="mse")
    run.fit(model, *features(run.ranks), callbacks=[BroadcastCallback(bucket_bytes=256)])
    return weights(model)


@scenario
def clipping_weight_decay_and_moving_average(run: Run) -> Outcome:
    run.seed()
    model = dense(keras.optimizers.AdamW(0.01, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=4))
    run.fit(model, *features(run.ranks))
    return weights(model)


@scenario
def accumulation(run: Run) -> Outcome:
    run.seed()
    model = dense(keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2, clipnorm=0.5))
    run.fit(model, *features(run.ranks, steps=4))
    return weights(model)


@scenario
def accumulation_of_an_embedding(run: Run) -> Outcome:
    """Sparse gradients on TensorFlow; and fits that end in the middle of an update."""
    run.seed()
    random = np.random.default_rng(2)
    x, y = random.integers(0, 50, (20 * run.ranks, 4)), random.normal(size=(20 * run.ranks, 1)).astype("float32")
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), layers.Embedding(50, 6), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01, gradient_accumulation_steps=3), loss="mse")
    run.fit(model, x, y, epochs=1)
    run.fit(model, x, y, epochs=1)
    return weights(model)


@scenario
def accumulation_in_mixed_precision(run: Run) -> Outcome:
    run.seed()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        inner = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
        model = dense(keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0))
        run.fit(model, *features(run.ranks, steps=4))
    finally:
        keras.config.set_dtype_policy("float32")
    return {name: value for name, value in weights(model).items() if name.startswith("weight")}


@scenario
def schedule(run: Run) -> Outcome:
    run.seed()
    model = dense(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.7)))
    run.fit(model, *features(run.ranks))
    return weights(model)


@scenario
def several_optimizers(run: Run) -> Outcome:
    """Chosen by a function, which ranks cannot compare; one accumulates, and one has a schedule."""
    run.seed()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.7)
    first, second = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), keras.optimizers.SGD(schedule)
    model = dense(keras.optimizers.MultiOptimizer(lambda variable: first if len(variable.shape) > 1 else second))
    run.fit(model, *features(run.ranks, steps=4))
    return weights(model)


class KeepsGradients(keras.optimizers.Optimizer):
    """Steps by the sum of this gradient, its change and an average; the change is that of Adan and Rprop."""

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self._last, self._mean = self.add_optimizer_variables(variables, ["last", "mean"])

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        i, rate = self._get_variable_index(variable), keras.ops.cast(learning_rate, variable.dtype)
        self.assign_add(self._mean[i], 0.1 * (gradient - self._mean[i]))
        change = gradient - self._last[i]
        self.assign_sub(variable, rate * (gradient + 0.5 * change + self._mean[i]))
        self.assign(self._last[i], gradient)


@scenario
def gradients_that_the_optimizer_keeps(run: Run) -> Outcome:
    """Small and large ones, which TensorFlow's variables adopt."""
    options: list[dict[str, Any]] = [{}, {"run_eagerly": True}, {"steps_per_execution": 3}]
    if BACKEND == "tensorflow":
        options.append({"jit_compile": True})
    found: Outcome = {}
    for number, chosen in enumerate(options):
        run.seed()
        stack = [keras.Input((5,)), layers.Dense(600, activation="tanh"), layers.Dense(500), layers.Dense(1)]
        model = keras.Sequential(stack)
        model.compile(optimizer=KeepsGradients(1e-4), loss="mse", **chosen)
        run.fit(model, *features(run.ranks, steps=6))
        found |= {f"{name} of {number}": value for name, value in weights(model).items()}
    return found


@scenario
def large_layer(run: Run) -> Outcome:
    """Gradients of more than 64 KiB, beside small ones."""
    run.seed()
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(200, activation="tanh"), layers.Dense(150), layers.Dense(1)]
    )
    model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss="mse")
    run.fit(model, *features(run.ranks))
    return weights(model)


# Sharded optimizers --------------------------------------------------------------------------------------


def sharded_fit(run: Run, model: Any, x: Any, y: Any, name: str = "", **options: Any) -> Outcome:
    """Train with a sharded optimizer, on several ranks; the state is rank 0's, which has all of it."""
    run.fit(model, x, y, callbacks=[BroadcastCallback(shard_optimizer=True)], **options)
    found = weights(model) if run.rank == 0 else {}
    found = found if run.is_alone else ring.broadcast_object(found)
    for i, value in enumerate(model.get_weights()):
        found[f"weight {i}"] = value
    return {f"{kind.split()[0]} {name} {kind}": value for kind, value in found.items()}


def wide(optimizer: Any, **options: Any) -> Any:
    """A model of which some variables lie on both ranks, one of them so large that it is gathered where it lies."""
    stack = [keras.Input((5,)), layers.Dense(600, activation="tanh"), layers.Dense(601), layers.Dense(1)]
    model = keras.Sequential(stack)
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


@scenario
def sharded_for_fifty_steps(run: Run) -> Outcome:
    run.seed()
    model = wide(keras.optimizers.Adam(1e-3, amsgrad=True))
    return sharded_fit(run, model, *features(run.ranks, steps=25))


OPTIMIZERS: dict[str, Any] = {
    "SGD": {},
    "Adadelta": {},
    "Adagrad": {},
    "Adamax": {},
    "AdamW": {"clipvalue": 0.01},
    "Ftrl": {"clipnorm": 0.05},
    "Lion": {},
    "Nadam": {"global_clipnorm": 0.05, "use_ema": True, "ema_overwrite_frequency": 3},
    "RMSprop": {"momentum": 0.9, "centered": True, "weight_decay": 0.01},
}


@scenario
def sharded_optimizers(run: Run) -> Outcome:
    found = {}
    for name, options in OPTIMIZERS.items():
        run.seed()
        optimizer = getattr(keras.optimizers, name)(1e-3, **options)
        if name == "AdamW":
            optimizer.exclude_from_weight_decay(var_names=["bias"])
        found |= sharded_fit(run, wide(optimizer), *features(run.ranks, steps=4), name=name)
    return found


@scenario
def sharded_with_everything_before_the_update(run: Run) -> Outcome:
    """Accumulation, clipping, loss scales, schedules and frozen layers, which concern whole gradients."""
    found = {}
    accumulating = {"gradient_accumulation_steps": 2, "clipnorm": 0.05}
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.7)
    scaled = keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2, global_clipnorm=0.05)
    makes = {
        "accumulates": lambda: keras.optimizers.SGD(rate, momentum=0.9, **accumulating),
        "scales": lambda: keras.optimizers.LossScaleOptimizer(scaled, initial_scale=64.0),
    }
    for name, make in makes.items():
        run.seed()
        model = wide(make(), steps_per_execution=1 if BACKEND == "torch" else 2)
        model.layers[0].trainable = name == "scales"
        model.layers[2].kernel.constraint = keras.constraints.MaxNorm(0.5)
        found |= sharded_fit(run, model, *features(run.ranks, steps=4), name=name)
    return found


@scenario
def sharded_and_compiled(run: Run) -> Outcome:
    """The second fit goes on with the state that the first has left on rank 0."""
    run.seed()
    model = wide(keras.optimizers.Adam(1e-3), jit_compile=True)
    sharded_fit(run, model, *features(run.ranks), epochs=1)
    return sharded_fit(run, model, *features(run.ranks), epochs=1)


@scenario
def sharded_and_eager(run: Run) -> Outcome:
    run.seed()
    model = dense(keras.optimizers.Adam(0.01), run_eagerly=True)
    return sharded_fit(run, model, *features(run.ranks))


@scenario
def sharded_embedding(run: Run) -> Outcome:
    """On TensorFlow the gradient has some rows, and each rank updates those of them that are its own."""
    run.seed()
    random = np.random.default_rng(2)
    x, y = random.integers(0, 80, (12 * run.ranks, 4)), random.normal(size=(12 * run.ranks, 1)).astype("float32")
    table = layers.Embedding(80, 60)
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), table, layers.GlobalAveragePooling1D(), layers.Dense(1)]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return sharded_fit(run, model, x, y)


# Batch normalization ------------------------------------------------------------------------------------


def normalized(**layer: Any) -> Any:
    """A convolutional model with BatchNormalization in two branches, on data far from zero."""
    inputs = keras.Input((6, 6, 1))
    x = layers.Conv2D(4, 3, use_bias=False)(layers.Rescaling(1.0, offset=3.0)(inputs))
    left = layers.BatchNormalization(momentum=0.5, **layer)(x)
    right = layers.BatchNormalization(momentum=0.5, **layer)(layers.Conv2D(4, 1)(x))
    x = layers.Flatten()(layers.Activation("relu")(left) + layers.Activation("relu")(right))
    model = keras.Model(inputs, layers.Dense(3)(layers.BatchNormalization(**layer)(x)))
    model.compile(
        optimizer=small_steps(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


@scenario
def batch_normalization(run: Run) -> Outcome:
    """With synchronization, weights and moving statistics equal those of one process."""
    run.seed()
    model = normalized()
    run.fit(model, *images(run.ranks), callbacks=[BroadcastCallback(synchronized_batch_norm=True)])
    return weights(model)


@scenario
def batch_normalization_as_keras_spells_it(run: Run) -> Outcome:
    run.seed()
    model = normalized(synchronized=True)
    run.fit(model, *images(run.ranks))
    return weights(model)


@scenario
def layers_that_synchronize(run: Run) -> Outcome:
    """Trained with other layers' statistics local, which does not touch these."""
    run.seed()
    norm = layers.BatchNormalization if run.is_alone else SyncBatchNormalization
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4), norm(momentum=0.8, name="norm"), layers.Dense(1)])
    model.compile(optimizer=small_steps(), loss="mse")
    x = np.random.default_rng(2).normal(size=(12 * run.ranks, 5)).astype("float32")
    run.fit(model, x, x[:, :1], callbacks=[BroadcastCallback(synchronized_batch_norm=False)])
    return weights(model)


@scenario
def compiled_batch_normalization(run: Run) -> Outcome:
    run.seed()
    model = normalized()
    model.compile(optimizer=small_steps(), loss=model.loss, jit_compile=True)
    run.fit(model, *images(run.ranks), callbacks=[BroadcastCallback(synchronized_batch_norm=True)])
    return weights(model)


@scenario
def batch_normalization_of_masked_steps(run: Run) -> Outcome:
    """Sequences of different lengths: ranks are weighted by their number of values."""
    run.seed()
    random = np.random.default_rng(4)
    x = random.normal(size=(12 * run.ranks, 7, 3)).astype("float32") + 1.0
    x[np.arange(7) >= random.integers(1, 8, len(x))[:, np.newaxis]] = 0.0
    model = keras.Sequential(
        [keras.Input((7, 3)), layers.Masking(), layers.BatchNormalization(), layers.Flatten(), layers.Dense(1)]
    )
    model.compile(optimizer=small_steps(), loss="mse")
    run.fit(model, x, x[:, 0, :1], callbacks=[BroadcastCallback(synchronized_batch_norm=True)])
    return weights(model)


@scenario
def moving_mean_of_own_batches(run: Run) -> Outcome:
    """Without synchronization, the moving mean of the first layer still equals that of one process."""
    run.seed()
    model = keras.Sequential([keras.Input((5,)), layers.BatchNormalization(momentum=0.8), layers.Dense(1)])
    model.compile(optimizer=small_steps(), loss="mse")
    run.fit(model, *features(run.ranks))
    return {"weight 0": np.array(keras.ops.convert_to_numpy(model.layers[0].moving_mean))}


# Models ------------------------------------------------------------------------------------------------


@scenario
def embedding(run: Run) -> Outcome:
    """On TensorFlow the gradient of the table is sparse."""
    run.seed()
    random = np.random.default_rng(2)
    x, y = random.integers(0, 50, (12 * run.ranks, 4)), random.normal(size=(12 * run.ranks, 1)).astype("float32")
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), layers.Embedding(50, 6), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    run.fit(model, x, y)
    return weights(model)


@scenario
def lazy_model(run: Run) -> Outcome:
    run.seed()
    model = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    run.fit(model, *features(run.ranks))
    return weights(model)


@scenario
def model_without_call(run: Run) -> Outcome:
    """Only its `train_step` knows how its parts are called, which are built before `fit` or by the first step."""
    import tensorflow as tf

    class Autoencoder(keras.Model):
        def __init__(self, encoder: Any, decoder: Any) -> None:
            super().__init__()
            self.encoder, self.decoder = encoder, decoder

        def train_step(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.decoder(self.encoder(x)) - x) ** 2)
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
            return {"loss": loss}

    found: Outcome = {}
    x, _ = features(run.ranks)
    for start in ([keras.Input((5,))], []):
        run.seed()
        model = Autoencoder(keras.Sequential([*start, layers.Dense(3)]), keras.Sequential([layers.Dense(5)]))
        if start:
            model.decoder.build((None, 3))
        optimizer = momentum()
        model.compile(optimizer=optimizer if run.is_alone or start else DistributedOptimizer(optimizer))
        data = tf.data.Dataset.from_tensor_slices(run.share(x, 4)).batch(4 * (run.ranks if run.is_alone else 1))
        model.fit(data, epochs=2, verbose=0, callbacks=[] if run.is_alone else [BroadcastCallback()])
        undistribute(optimizer)
        found |= {f"{name} of {len(start)}": value for name, value in weights(model).items()}
    return found


@scenario
def two_outputs_with_weights(run: Run) -> Outcome:
    run.seed()
    inputs = keras.Input((5,))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    model = keras.Model(inputs, [layers.Dense(1)(hidden), layers.Dense(2)(hidden)])
    model.compile(optimizer=momentum(), loss=["mse", "mae"], loss_weights=[1.0, 0.5])
    x, y = features(run.ranks)
    sample = np.linspace(0.5, 1.5, len(x)).astype("float32")
    run.fit(model, x, [y, np.concatenate([y, -y], 1)], sample_weight=[sample, sample])
    return weights(model)


@scenario
def class_weights(run: Run) -> Outcome:
    run.seed()
    model = keras.Sequential([keras.Input((6, 6, 1)), layers.Flatten(), layers.Dense(3)])
    model.compile(optimizer=momentum(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    run.fit(model, *images(run.ranks), class_weight={0: 1.0, 1: 2.0, 2: 0.5})
    return weights(model)


@scenario
def frozen_layer_and_low_rank_adapter(run: Run) -> Outcome:
    run.seed()
    model = keras.Sequential([keras.Input((5,)), layers.Dense(8), layers.Dense(8), layers.Dense(1)])
    model.layers[0].trainable = False
    model.layers[1].enable_lora(2)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    run.fit(model, *features(run.ranks))
    return weights(model)


@scenario
def gradient_of_nothing(run: Run) -> Outcome:
    """A layer that the loss does not depend on has the gradient None, or zero on JAX."""
    run.seed()

    class Partly(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.idle, self.head = layers.Dense(3), layers.Dense(1)
            self.idle.build((None, 5))
            self.head.build((None, 5))
            self.built = True

        def call(self, x: Any) -> Any:
            return self.head(x)

    model = Partly()
    model.compile(optimizer=momentum(), loss="mse")
    run.fit(model, *features(run.ranks))
    return weights(model)


@scenario
def mixed_precision(run: Run) -> Outcome:
    run.seed()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        # At this scale nothing overflows. A rank's part of a batch has larger gradients than the whole batch.
        model = dense(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0))
        run.fit(model, *features(run.ranks))
    finally:
        keras.config.set_dtype_policy("float32")
    return weights(model)


# Steps -------------------------------------------------------------------------------------------------


@scenario
def several_steps_an_execution(run: Run) -> Outcome:
    run.seed()
    model = dense(momentum(), steps_per_execution=3)
    run.fit(model, *features(run.ranks, steps=6))
    return weights(model)


@scenario
def several_accumulating_steps_an_execution(run: Run) -> Outcome:
    """The next step does not depend on the accumulators, so its gradients may come while averages are still read."""
    run.seed()
    model = dense(keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3), steps_per_execution=6)
    run.fit(model, *features(run.ranks, steps=12))
    return weights(model)


@scenario
def eager(run: Run) -> Outcome:
    run.seed()
    model = dense(momentum(), run_eagerly=True)
    run.fit(model, *features(run.ranks))
    return weights(model)


@scenario
def compiled(run: Run) -> Outcome:
    run.seed()
    model = dense(keras.optimizers.Adam(0.01), jit_compile=True)
    run.fit(model, *features(run.ranks), epochs=1)
    run.fit(model, *features(run.ranks), epochs=1)
    return weights(model)


@scenario
def compiled_by_torch(run: Run) -> Outcome:
    return compiled(run)


@scenario
def compiled_several_steps_an_execution(run: Run) -> Outcome:
    run.seed()
    model = dense(momentum(), jit_compile=True, steps_per_execution=2)
    run.fit(model, *features(run.ranks, steps=4), epochs=1)
    return weights(model)


@scenario
def compiled_accumulation(run: Run) -> Outcome:
    run.seed()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
    model = dense(optimizer, jit_compile=True)
    run.fit(model, *features(run.ranks, steps=4))
    return weights(model)


@scenario
def eager_accumulation(run: Run) -> Outcome:
    run.seed()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
    model = dense(optimizer, run_eagerly=True)
    run.fit(model, *features(run.ranks, steps=4))
    return weights(model)


@scenario
def not_compiled(run: Run) -> Outcome:
    run.seed()
    model = dense(momentum(), jit_compile=False)
    run.fit(model, *features(run.ranks))
    return weights(model)


@scenario
def fitted_before_without_and_twice_with(run: Run) -> Outcome:
    """An earlier train function, which does not average, must not be used again."""
    run.seed()
    model = dense(keras.optimizers.Adam(0.01))
    x, y = features(run.ranks)
    model.fit(x, y, batch_size=4 * run.ranks, shuffle=False, verbose=0)
    before = vars(model.optimizer).get("apply")
    run.fit(model, x, y)
    run.fit(model, x, y)
    assert vars(model.optimizer).get("apply") is before is None
    return weights(model)


@scenario
def explicit_optimizer(run: Run) -> Outcome:
    run.seed()
    optimizer = momentum() if run.is_alone else DistributedOptimizer(momentum())
    assert type(optimizer) is type(momentum())
    model = dense(optimizer)
    run.fit(model, *features(run.ranks))
    undistribute(optimizer)
    return weights(model)


@scenario
def remainder(run: Run) -> Outcome:
    """A last batch of another size makes the frameworks retrace."""
    run.seed()
    model = dense(momentum())
    x, y = features(run.ranks, steps=5, batch=2)
    parts = [run.share(a[: 8 * run.ranks], 4) for a in (x, y)], [run.share(a[8 * run.ranks :], 2) for a in (x, y)]
    x, y = (np.concatenate(pair) for pair in zip(*parts, strict=True))
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    whole = 4 * run.ranks if run.is_alone else 4
    model.fit(x, y, batch_size=whole, callbacks=[] if run.is_alone else [BroadcastCallback()], **options)
    return weights(model)
