"""Ranks with different numbers of batches, and batches of different sizes, against one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers

import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback, MetricAverageCallback, predict, shard
from ring_plugins.observe import same_samples
from tests.keras.behaviors import behavior, error_of, logged
from tests.keras.scenarios import BACKEND

BATCH = 4
Batch = tuple[np.ndarray, ...]


def batches_of(rank: int, ragged: bool = True) -> list[Batch]:
    """x, y and sample weights of a rank: 3 and a part, 5, 2 and a part..."""
    rng = np.random.default_rng(rank)
    sizes = [BATCH] * (3, 5, 2, 4, 1)[rank] + [(2, 0, 3, 0, 1)[rank]] * ragged
    shapes = (5,), (1,), ()
    return [
        tuple(rng.uniform(0.5, 2, size=(size, *shape)).astype("float32") for shape in shapes) for size in sizes if size
    ]


class Batches(keras.utils.PyDataset):
    def __init__(self, batches: Sequence[Batch], **options: Any) -> None:
        super().__init__(**options)
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index]


def generator(batches: Sequence[Batch]) -> Iterator[Batch]:
    yield from batches


def joined(batches: Sequence[Batch]) -> Batch:
    return tuple(map(np.concatenate, zip(*batches, strict=True)))


def loader(batches: Sequence[Batch]) -> Any:
    import torch

    tensors = map(torch.from_numpy, joined(batches))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tensors), batch_size=BATCH)


def tf_data(batches: Sequence[Batch], known: bool = True) -> Any:
    import tensorflow as tf

    samples = tf.data.Dataset.from_tensor_slices(joined(batches))
    return (samples if known else samples.filter(lambda *_: True)).batch(BATCH)


def model_of(normalized: bool = False, **options: Any) -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    hidden = layers.Dense(6, activation="tanh", kernel_regularizer="l2")(inputs)
    hidden = layers.BatchNormalization()(hidden) if normalized else hidden
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    optimizer = options.pop("optimizer", None) or optimizer_of(normalized)
    model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mse"], **options)
    return model


def optimizer_of(normalized: bool) -> Any:
    """Adam would make large updates of the rounding errors of a normalized layer's small gradients."""
    return keras.optimizers.SGD(0.05) if normalized else keras.optimizers.Adam(0.02)


def trained(model: Any, data: Callable[[int], Any], epochs: int = 2, **options: Any) -> dict[str, Any]:
    """How far this job is from one process with all ranks' batches of each step together."""
    alone = keras.models.clone_model(model)
    alone.set_weights(model.get_weights())
    whole = [batches_of(rank, options.pop("ragged", True)) for rank in range(ring.size())]
    steps = range(max(map(len, whole)))
    together = Batches([joined([batches[step] for batches in whole if step < len(batches)]) for step in steps])
    compiled = {"metrics": ["mae"], "weighted_metrics": ["mse"], "steps_per_execution": model.steps_per_execution}
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    alone.compile(optimizer, "mse", jit_compile=False, **compiled)
    expected = alone.fit(together, epochs=epochs, shuffle=False, verbose=0)
    callbacks = [MetricAverageCallback(), BroadcastCallback(**options)]
    given = data(ring.rank())
    inputs = given if isinstance(given, dict) else {"x": given}
    found = model.fit(**inputs, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
    logs = [
        abs(a - b) / max(abs(b), 1)
        for name, values in expected.history.items()
        for a, b in zip(found.history[name], values, strict=True)
    ]
    weights = [weight.tobytes() for weight in model.get_weights()]
    both = model.optimizer.variables, alone.optimizer.variables
    states = [] if options.get("shard_optimizer") else zip(*both, strict=True)  # which has others beside
    values = [(keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b)) for a, b in states]
    return {
        "weights": max(float(abs(a - b).max()) for a, b in pairs),
        "optimizer": max((float((abs(a - b) / np.maximum(abs(b), 1)).max()) for a, b in values), default=0.0),
        "logs": max(logs),
        "equal": len({repr(one) for one in ring.all_gather_object(weights)}) == 1,
        "steps": int(model.optimizer.iterations),
        "steps alone": int(alone.optimizer.iterations),
    }


@behavior
def uneven_data() -> Any:
    """Every kind of data that `fit` takes."""

    def arrays(rank: int) -> dict[str, Any]:
        x, y, weights = joined(batches_of(rank))
        return {"x": x, "y": y, "sample_weight": weights, "batch_size": BATCH}

    kinds: dict[str, Callable[[int], Any]] = {
        "arrays": arrays,
        "PyDataset": lambda rank: Batches(batches_of(rank)),
        "DataLoader": lambda rank: loader(batches_of(rank)),
        "tf.data": lambda rank: tf_data(batches_of(rank)),
        "tf.data of unknown length": lambda rank: tf_data(batches_of(rank), known=False),
    }
    found = {kind: trained(model_of(), data) for kind, data in kinds.items()}
    found["generator"] = trained(model_of(), lambda rank: generator(batches_of(rank)), epochs=1)
    return found


@behavior
def uneven_steps_of_other_kinds() -> Any:
    """What else a step may do."""

    def data(rank: int) -> Any:
        return Batches(batches_of(rank))

    found = {
        "normalized": trained(model_of(normalized=True), data, synchronized_batch_norm=True),
        "eager": trained(model_of(run_eagerly=True), data),
        "sharded": trained(model_of(), data, shard_optimizer=True),
    }
    if BACKEND != "torch":
        found["compiled"] = trained(model_of(jit_compile=True), data)
    return found


@behavior
def uneven_groups_of_steps() -> Any:
    """Steps of which several belong together: the last group of the epochs is a part of one."""

    def accumulating(passes: int, **options: Any) -> Any:
        return model_of(optimizer=keras.optimizers.Adam(0.02, gradient_accumulation_steps=passes), **options)

    kinds: dict[str, Callable[[int], Any]] = {
        "PyDataset": lambda rank: Batches(batches_of(rank)),
        "DataLoader": lambda rank: loader(batches_of(rank)),
    }
    found = {f"accumulated {kind}": trained(accumulating(4), data) for kind, data in kinds.items()}
    found["sharded"] = trained(accumulating(3), kinds["PyDataset"], shard_optimizer=True)
    if BACKEND == "torch":  # whose steps Keras refuses to execute together
        return found
    found["compiled"] = trained(accumulating(3, jit_compile=True), kinds["PyDataset"])
    kinds["tf.data of unknown length"] = lambda rank: tf_data(batches_of(rank), known=False)
    for steps, kind in ((2, "DataLoader"), (7, "PyDataset"), (3, "tf.data of unknown length")):
        found[f"{steps} executed, {kind}"] = trained(model_of(steps_per_execution=steps), kinds[kind])
    found["generator"] = trained(model_of(steps_per_execution=2), lambda rank: generator(batches_of(rank)), epochs=1)
    normalized = model_of(normalized=True, steps_per_execution=2)
    found["normalized"] = trained(normalized, kinds["PyDataset"], synchronized_batch_norm=True)
    found["both"] = trained(accumulating(4, steps_per_execution=3), kinds["PyDataset"])
    return found


class OwnStep(keras.Model):
    """Computes gradients of a loss that nothing has scaled, on torch."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        loss.backward()
        variables = self.trainable_weights
        self.optimizer.apply([variable.value.grad for variable in variables], variables)
        return {"loss": float(loss)}


@behavior
def uneven_data_in_other_ways() -> Any:
    """Options of `fit` and `compile` beside uneven data, on torch; also what is refused."""

    def fit(model: Any, rank_data: Any = None, **options: Any) -> dict[str, Any]:
        x, y, _ = joined(batches_of(ring.rank()))
        given = {"x": x, "y": (y > 1).astype("int32")} if rank_data is None else {"x": rank_data}
        averages = [MetricAverageCallback()] if options.pop("averages", True) else []
        callbacks = [*averages, BroadcastCallback()]
        kept = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
        batches: list[int] = []
        history = model.fit(**given, batch_size=BATCH, verbose=0, callbacks=[kept, *callbacks], **options).history
        weights = [weight.tobytes() for weight in model.get_weights()]
        told = ring.all_gather_object((weights, history, batches))
        return {"equal": all(repr(one) == repr(told[0]) for one in told), "batches": batches, "history": history}

    mixed = model_of()
    mixed.compile(keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=8.0), "mse")
    whole = model_of()
    own = OwnStep(whole.inputs, whole.outputs)
    own.compile(keras.optimizers.SGD(0.01))
    part = shard(joined(batches_of(0)), batch_size=BATCH, shuffle=False, remainder="keep")
    few = shard(tuple(array[:1] for array in joined(batches_of(0))), batch_size=2, shuffle=False, remainder="keep")
    validation = joined(batches_of(ring.rank() + 2))
    return {
        "class weights": fit(model_of(), class_weight={0: 0.5, 1: 2.0}),
        "steps_per_epoch": fit(model_of(), Batches(batches_of(ring.rank())), steps_per_epoch=4, epochs=3),
        "steps of a generator": fit(model_of(), generator(batches_of(ring.rank())), steps_per_epoch=10),
        "scaled": fit(mixed),
        "validated": fit(model_of(), validation_data=validation, validation_batch_size=BATCH, epochs=2),
        "kept": fit(model_of(), part),
        "one sample": fit(model_of(), few, epochs=2),
        "one sample, without averages": fit(model_of(), few, epochs=2, averages=False),
        "own step": error_of(lambda: fit(own)),
        "error": error_of(lambda: model_of().fit(few, verbose=0, callbacks=[BroadcastCallback(uneven="error")])),
        "no such": error_of(lambda: BroadcastCallback(uneven="pad")),  # type: ignore[arg-type]
    }


def divided(count: int, shuffle: bool = False) -> dict[str, Callable[[], Any]]:
    """Data of so many samples, which are not divided yet, by kind."""
    import torch

    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, 5)).astype("float32")
    y = (x.sum(1, keepdims=True) > 0).astype("float32")
    weights = rng.uniform(0.5, 2, size=count).astype("float32")
    batches = [(x[i : i + 2], y[i : i + 2], weights[i : i + 2]) for i in range(0, count, 2)]
    pairs = torch.utils.data.TensorDataset(*map(torch.from_numpy, (x, y, weights)))
    found: dict[str, Callable[[], Any]] = {
        "arrays": lambda: (x, y, weights),
        "PyDataset": lambda: Batches(batches),
        "generator": lambda: generator(batches),
        "DataLoader": lambda: torch.utils.data.DataLoader(pairs, batch_size=2),
    }
    if BACKEND == "tensorflow":
        found["tf.data"] = lambda: tf_data(batches)
        found["tf.data of unknown length"] = lambda: tf_data(batches, known=False)
    return found


def classifier(dtype: str = "float32") -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,), dtype=dtype)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid", dtype=dtype)(inputs))
    metrics = ["accuracy", "auc", keras.metrics.F1Score(threshold=0.5), "precision"]
    model.compile("sgd", "binary_crossentropy", metrics=metrics, weighted_metrics=["mse"])
    return model


@behavior
def the_same_samples() -> Any:
    """What is said where nothing has divided the data, and where ranks have their own."""
    with mock.patch.object(same_samples, "_told", []), logged() as lines:
        for rank in (ring.rank(), 0, 0):
            data, callbacks = Batches(batches_of(rank, ragged=False)), [BroadcastCallback()]
            model_of().fit(data, verbose=0, shuffle=False, callbacks=callbacks)
            lines.append("end of fit")
    return [line for line in lines if "same samples" in line or line == "end of fit"]


@behavior
def exact_evaluation() -> Any:
    """By number of samples and kind of data: the difference of metrics and predictions to those of one process."""
    found: dict[str, Any] = {}
    for count in (1, 3, 7, 22):
        for kind, make in divided(count).items():
            model = classifier()
            x, y, weights = divided(count)["arrays"]()
            expected = model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
            part = shard(make(), batch_size=2, shuffle=False, remainder="keep")
            callbacks = [MetricAverageCallback()]
            logs = model.evaluate(part, verbose=0, callbacks=callbacks, return_dict=True)
            both = keras.Model(model.input, {"one": model.output, "two": layers.Rescaling(2.0)(model.output)})
            predictions, alone = predict(both, make(), batch_size=2, verbose=0), both.predict(x, verbose=0)
            found[f"{count} {kind}"] = {
                "metrics": max(float(np.max(np.abs(logs[name] - value))) for name, value in expected.items()),
                "predictions": max(float(abs(predictions[name] - alone[name]).max()) for name in alone),
                "shape": predictions["two"].shape,
            }
        if BACKEND == "jax":  # which computes in float32
            continue
        before = keras.config.floatx()
        keras.config.set_floatx("float64")
        try:
            model, callbacks = classifier("float64"), [MetricAverageCallback()]
            given = tuple(array.astype("float64") for array in (x, y, weights))
            expected = model.evaluate(*given[:2], sample_weight=given[2], verbose=0, return_dict=True)
            part = shard(given, batch_size=2, shuffle=False, remainder="keep")
            logs = model.evaluate(part, verbose=0, callbacks=callbacks, return_dict=True)
        finally:
            keras.config.set_floatx(before)
        precise = max(float(np.max(np.abs(logs[name] - value))) for name, value in expected.items())
        found[f"{count} arrays"]["in float64"] = precise
    return found


@behavior
def decisions_by_validation() -> Any:
    """What callbacks decide in a `fit` whose training and validation data divide into unequal parts."""
    model, decided = model_of(), keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=10.0)
    stops = keras.callbacks.EarlyStopping(patience=3, min_delta=10.0)
    x, y, weights = joined(batches_of(0) + batches_of(1))
    training = shard((x, y, weights), batch_size=BATCH, remainder="keep")
    validation = shard((x[:3], y[:3], weights[:3]), batch_size=1, shuffle=False, remainder="keep")
    callbacks = [decided, stops, MetricAverageCallback(), BroadcastCallback()]
    seen = model.fit(training, validation_data=validation, epochs=9, shuffle=False, verbose=0, callbacks=callbacks)
    expected = model.evaluate(x[:3], y[:3], sample_weight=weights[:3], verbose=0, return_dict=True)
    return {"history": seen.history, "last": max(abs(seen.history[f"val_{k}"][-1] - v) for k, v in expected.items())}
