"""What the callbacks do on two ranks, beside making weights equal.

Each function runs on every rank and returns what it saw; its test looks at what all ranks returned.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import keras
import numpy as np
from keras import layers

import ring_plugins as ring
from ring_plugins.keras import (
    BestModelCheckpoint,
    BroadcastCallback,
    DistributedOptimizer,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    shard,
)
from ring_plugins.keras.averaging import averaging_of
from tests.keras.scenarios import BACKEND, Run, dense, features, momentum

BEHAVIOURS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {}
ALL = ("tensorflow", "torch", "jax")


def behaviour(*backends: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        BEHAVIOURS[function.__name__] = (function, backends or ALL)
        return function

    return register


def fit(model: Any, callbacks: Any, steps: int = 4, **options: Any) -> Any:
    x, y = features(1, steps)
    return model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=callbacks, **options)


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# Metrics -----------------------------------------------------------------------------------------------


class Largest(keras.metrics.Metric):
    """A metric whose state is no sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.seen = self.add_variable((), "zeros", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign(keras.ops.maximum(self.seen, keras.ops.max(y_true)))

    def result(self) -> Any:
        return self.seen.value


@behaviour()
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
        # The callback before ours must see the same as those behind it.
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs))),
                   BroadcastCallback(), MetricAverageCallback()],
    ).history  # fmt: skip
    validated = {name: seen[-1][f"val_{name}"] for name in expected}
    return {
        "expected": expected, "evaluate": found, "local": local, "validation": validated,
        "validations": len(history["val_auc"]), "history": history["val_auc"][-1], "seen": seen[-1]["val_auc"],
        "left": MetricAverageCallback._METHOD in vars(model),
    }  # fmt: skip


@behaviour()
def metric_that_is_no_sum() -> Any:
    import warnings

    model = dense(keras.optimizers.SGD(0.0), metrics=[Largest()])
    y = np.full((8, 1), 1.0 + 2 * ring.rank(), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = model.evaluate(
            np.zeros((8, 5), "float32"), y, verbose=0, return_dict=True, callbacks=[MetricAverageCallback()]
        )
    return {"largest": logs["largest"], "said": [str(w.message) for w in caught if "is no sum" in str(w.message)]}


# Learning rate -----------------------------------------------------------------------------------------


class Rates(keras.callbacks.Callback):
    """Writes down the rate of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


@behaviour()
def warm_up() -> Any:
    model, rates = dense(keras.optimizers.SGD(0.1, momentum=0.9)), Rates()
    warm = LearningRateWarmupCallback(warmup_epochs=2)
    schedule = LearningRateScheduleCallback(0.1, start_epoch=3)
    fit(model, [warm, schedule, rates, BroadcastCallback()], epochs=4)
    again = Rates()
    fit(model, [LearningRateWarmupCallback(warmup_epochs=1), again, BroadcastCallback()], epochs=2)
    return {"rates": rates.seen, "again": again.seen}


@behaviour()
def warm_up_of_a_schedule() -> Any:
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)
    model, rates = dense(keras.optimizers.SGD(decay)), Rates()
    fit(model, [LearningRateWarmupCallback(warmup_epochs=1), rates, BroadcastCallback()], epochs=2)
    # Rates are read after the update that counted them.
    multipliers = [min(1 + step / 4, 2.0) for step in range(1, 9)]
    expected = [0.1 * 0.5 ** (step / 4) * m for step, m in zip(range(1, 9), multipliers, strict=True)]
    return {"rates": rates.seen, "expected": expected}


@behaviour()
def warm_up_then_plateau() -> Any:
    model, rates = dense(keras.optimizers.SGD(1e-7)), Rates()
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=10.0, min_lr=0)
    calls = [LearningRateWarmupCallback(warmup_epochs=1), plateau, rates, BroadcastCallback(), MetricAverageCallback()]
    fit(model, calls, epochs=5)
    return [rate / 1e-7 for rate in rates.seen[3::4]]


@behaviour()
def warm_up_resumed() -> Any:
    """A model that was saved in the middle goes on with its rate, whoever loads it."""
    path = Path(mkdtemp()) / "model.keras"
    model = dense(keras.optimizers.SGD(0.1))
    fit(model, [LearningRateWarmupCallback(warmup_epochs=4), BroadcastCallback()], epochs=2)
    model.save(path)
    loaded, rates = keras.saving.load_model(path), Rates()
    fit(loaded, [LearningRateWarmupCallback(warmup_epochs=4), rates, BroadcastCallback()], initial_epoch=2, epochs=5)
    return rates.seen


@behaviour()
def multiples_in_a_range_of_epochs() -> Any:
    """Square-root scaling, and a multiplier that follows the fraction of an epoch."""
    rates, log = Rates(), Path(mkdtemp()) / "log.csv"
    halves = LearningRateScheduleCallback(lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=2, staircase=False)
    calls = [LearningRateWarmupCallback(warmup_epochs=0, scaling="sqrt"), halves, rates, keras.callbacks.CSVLogger(log)]
    fit(dense(momentum()), [*calls, BroadcastCallback(write_on_root_only=False)], epochs=3)
    return {"rates": rates.seen, "written": log.exists()}


@behaviour()
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


@behaviour()
def rates_that_part() -> Any:
    class Halves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / (1 + ring.rank())

    return error_of(lambda: fit(dense(momentum()), [Halves(), BroadcastCallback()]))


# State and files ---------------------------------------------------------------------------------------


@behaviour()
def state_of_another_root() -> Any:
    """Ranks that trained apart start from rank 1's weights and optimizer; without averaging they part again."""

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


@behaviour()
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


@behaviour()
def dropout_masks() -> Any:
    """With the same global seed and the same data everywhere, ranks still drop different units."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((40,)), layers.Dropout(0.5), layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss=lambda y, p: p)
    x = (2.0 ** -np.arange(40, dtype="float32")).reshape(1, 40)  # the loss tells which units were there
    fits = [model.fit(x, x[:, :1], verbose=0, callbacks=[BroadcastCallback()]) for _ in range(2)]
    return [fitted.history["loss"][0] for fitted in fits]


@behaviour()
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


@behaviour()
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
    if BACKEND == "tensorflow" and ring.rank() == 1:  # where it must not even look for its package
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


@behaviour()
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


# Stopping ----------------------------------------------------------------------------------------------


@behaviour()
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


@behaviour()
def fit_that_raises() -> Any:
    """What a fit that failed leaves behind, as soon as its exception is dealt with."""

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
    # A callback that is used again, once a fit and once an evaluation, must not be undone late by the first.
    again = MetricAverageCallback()
    if BACKEND != "jax":  # where an evaluation that raises leaves a model without weights, which is Keras's own doing
        error_of(lambda: model.evaluate(x, y, batch_size=4, verbose=0, callbacks=[again, Fails()]))
    left += [f"{name} of evaluate" for name in (MetricAverageCallback._METHOD,) if name in vars(model)]
    if ring.rank() == 1:  # alone: were anything averaged still, it would wait for ever
        model.fit(x, y, batch_size=4, verbose=0)
    apart = model.get_weights()
    fit(model, [BroadcastCallback(), again])
    together = [float(np.sum(value)) for value in model.get_weights()]
    return {"error": error, "left": left, "apart": float(np.sum(apart[0])), "together": together}


# Refusals ----------------------------------------------------------------------------------------------


@behaviour()
def refusals() -> Any:
    x, y = features(1, 4)
    rows = 16 if ring.rank() == 0 else 8
    found = {
        "steps": error_of(
            lambda: dense(momentum()).fit(x[:rows], y[:rows], batch_size=4, verbose=0, callbacks=[BroadcastCallback()])
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
    model.hides = True  # looked for in every fit
    found["no reduction"] = error_of(lambda: fit(model, [BroadcastCallback()]))
    return found


@behaviour()
def accumulation_is_reduced_once_an_update() -> Any:
    model = dense(DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)))
    fit(model, [BroadcastCallback()], steps=6)
    averaging = averaging_of(model.optimizer)
    assert averaging is not None
    return {"updates": averaging.reductions, "weights": [float(np.sum(value)) for value in model.get_weights()]}


@behaviour("tensorflow")
def inside_xla() -> Any:
    """XLA compiles no calls to the host: an error that says so, and a fit that goes on without XLA."""
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
    refused = error_of(lambda: tf.function(step, jit_compile=True)(x))
    nested = error_of(lambda: tf.function(lambda x: 2.0 * tf.function(step, autograph=False)(x), jit_compile=True)(x))
    tf.function(step)(x)  # and nothing is out of step
    import warnings

    model = Adversarial()
    model.compile(loss="mse", optimizer=None, jit_compile=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, [BroadcastCallback()])
    return {
        "refused": refused, "nested": nested, "found": np.ravel(layer.get_weights()[0]).tolist(),
        "said": [str(w.message) for w in caught if "without XLA" in str(w.message)],
        "weights": [value.tolist() for value in model.get_weights()],
    }  # fmt: skip


@behaviour("tensorflow")
def refusal_of_a_strategy() -> Any:
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        model = dense(momentum())
    return error_of(lambda: fit(model, [BroadcastCallback()]))


@behaviour()
def refusal_of_a_distribution() -> Any:
    model = dense(momentum())
    placed = keras.distribution.distribution
    keras.distribution.distribution = lambda: keras.distribution.DataParallel.__new__(keras.distribution.DataParallel)
    try:
        return error_of(lambda: fit(model, [BroadcastCallback()]))
    finally:
        keras.distribution.distribution = placed


@behaviour("torch")
def refusal_of_ddp() -> Any:
    model = dense(momentum())
    object.__setattr__(model, "ddp_model", model)
    return error_of(lambda: fit(model, [BroadcastCallback()]))


# Steps of the user's own -------------------------------------------------------------------------------


@behaviour()
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


@behaviour("tensorflow", "torch")
def adversarial_training() -> Any:
    """Two optimizers in one train_step, one process on all data against both on their parts."""
    outcomes = [_adversarial(Run(0, 1, ring.size())), _adversarial(Run(ring.rank(), ring.size(), ring.size()))]
    return {"alone": outcomes[0], "together": outcomes[1]}


def _adversarial(run: Run) -> Any:
    run.seed()
    model = Adversarial()
    model.compile(loss="mse", optimizer=None)
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


@behaviour("jax")
def two_optimizers_in_one_compiled_step() -> Any:
    """Neither update needs the other's result; calls to the other ranks must come in one order all the same."""
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


@behaviour()
def own_loop() -> Any:
    """A loop without fit: equal to the mean of both ranks' gradients by hand."""
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


@behaviour("torch")
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


# Data --------------------------------------------------------------------------------------------------


@behaviour()
def sharded_arrays() -> Any:
    x = np.arange(22, dtype="float32").reshape(22, 1)
    epochs: list[list[float]] = []

    data = shard((x, x), batch_size=5, seed=1)
    for _ in range(2):
        epochs.append([float(v) for i in range(len(data)) for v in data[i][0].ravel()])
        data.on_epoch_end()
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse", metrics=["mse"])
    model.fit(shard((x, x), batch_size=5), epochs=2, verbose=0, shuffle=False, callbacks=[BroadcastCallback()])
    whole = shard((x, x), batch_size=5, remainder="keep")
    kept = model.evaluate(whole, verbose=0, return_dict=True, callbacks=[MetricAverageCallback()])
    expected = model.evaluate(x, x, verbose=0, return_dict=True)
    return {"epochs": epochs, "steps": len(data), "kept": kept["mse"] / expected["mse"]}


@behaviour("jax")
def sharded_streams() -> Any:
    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> Any:
            return index

    data = shard(Batches(), seed=2)
    epochs = []
    for _ in range(2):
        epochs.append([data[i] for i in range(len(data))])
        data.on_epoch_end()
    padded = shard(Batches(), remainder="pad", shuffle=False)
    return {
        "dataset": epochs,
        "padded": [padded[i] for i in range(len(padded))],
        "generator": list(shard(i for i in range(7))),
        "keep": error_of(lambda: shard(Batches(), remainder="keep")),
        "few": error_of(lambda: shard(np.zeros((3, 1)), batch_size=4)),
        "lengths": error_of(lambda: shard((np.zeros(8), np.zeros(9)), batch_size=1)),
    }


@behaviour("torch")
def sharded_data_loader() -> Any:
    import torch

    def epoch(loader: Any) -> Any:
        return [int(v) for batch in loader for v in batch[0]]

    numbers = torch.utils.data.TensorDataset(torch.arange(13))
    shuffled = shard(torch.utils.data.DataLoader(numbers, batch_size=3, shuffle=True))
    plain = shard(torch.utils.data.DataLoader(numbers, batch_size=3), remainder="keep")
    return {"epochs": [epoch(shuffled), epoch(shuffled)], "plain": [epoch(plain), epoch(plain)], "steps": len(shuffled)}


@behaviour("tensorflow")
def sharded_tf_data() -> Any:
    import tensorflow as tf

    numbers = tf.data.Dataset.range(9)
    tf.random.set_seed(None)
    unseeded = error_of(lambda: shard(numbers.shuffle(4)))
    keras.utils.set_random_seed(ring.rank())
    global_seed = error_of(lambda: shard(numbers, shuffle=True))
    keras.utils.set_random_seed(0)

    def read(dataset: Any) -> Any:
        return [int(v) for v in dataset]

    shuffled = shard(numbers, shuffle=True, seed=3)
    unknown = numbers.filter(lambda v: v >= 0)
    pairs = tf.data.Dataset.zip((unknown, unknown))
    return {
        "epochs": [read(shuffled), read(shuffled)],
        "known": read(shard(numbers)),
        "unknown": read(shard(unknown)),
        "pairs": [int(a) for a, _ in shard(pairs)],
        "kept": read(shard(numbers, remainder="keep")),
        "unseeded": unseeded,
        "seeded": error_of(lambda: shard(numbers.shuffle(4, seed=1))),
        "other seed": error_of(lambda: shard(numbers.shuffle(4, seed=1 + ring.rank()))),
        "global seed": global_seed,
    }


# Last: ranks that went different ways share nothing any more ------------------------------------------------


@behaviour()
def unequal_steps_of_a_generator() -> Any:
    """Nobody knows the length beforehand: found when one rank's epoch is over."""

    def batches() -> Any:
        for _ in range(3 + ring.rank()):
            yield np.ones((4, 5), "float32"), np.ones((4, 1), "float32")

    return error_of(lambda: dense(momentum()).fit(batches(), verbose=0, callbacks=[BroadcastCallback()]))
