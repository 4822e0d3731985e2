"""A `fit` that is interrupted in the middle of an epoch and goes on; TEST_OPTIONS says how, see test_backup.py."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import layers

import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback, LearningRateWarmupCallback, MetricAverageCallback, shard
from ring_plugins.keras.averaging import averaging_of
from tests.worker import report

EPOCHS, TOGETHER = 3, 12
options: dict[str, Any] = json.loads(os.environ["TEST_OPTIONS"])
COUNT: int = options.get("count", 60)


class Recording(keras.Model):
    """Knows which samples it has been trained on, by the number that each has in its first feature."""

    seen: list[int]

    def train_step(self, *arguments: Any) -> Any:
        x = keras.ops.convert_to_numpy(arguments[-1][0])
        share = getattr(averaging_of(self.optimizer), "share", None)
        if share is not None and share.is_filling:  # which does not count
            return super().train_step(*arguments)
        self.seen.extend(np.round(x[:, 0] * COUNT).astype(int).tolist())
        return super().train_step(*arguments)


class Interrupting(keras.callbacks.Callback):
    """Sends this process a signal before a step, counted from the beginning of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.numbers, self.rates = 0, list[int](), list[float]()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        rank, step, number = options.get("signal", (-1, -1, 0))
        if step == self.steps and rank in (ring.rank(), "all"):
            os.kill(os.getpid(), number)
        self.steps += 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        slow_rank, seconds = options.get("slow", (-1, 0))
        time.sleep(seconds * (slow_rank == ring.rank()))
        self.numbers.append(batch)
        self.rates.append(round(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)), 9))
        report("seen", self._model.seen)
        report("numbers", self.numbers)


def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(COUNT, 4)).astype("float32")
    x[:, 0] = np.arange(COUNT) / COUNT
    return x, x.sum(1, keepdims=True)


class Batches(keras.utils.PyDataset):
    def __init__(self, size: int, **workers: Any) -> None:
        super().__init__(**workers)
        self.size = size

    def __len__(self) -> int:
        return int(np.ceil(COUNT / self.size))

    def __getitem__(self, index: int) -> Any:
        return tuple(array[index * self.size : (index + 1) * self.size] for array in arrays())


def stream(size: int) -> Iterator[Any]:
    for _ in range(EPOCHS):
        yield from map(Batches(size).__getitem__, range(COUNT // size))


def data_of(kind: str, size: int) -> Any:
    remainder = options.get("remainder", "drop")
    if kind == "arrays":
        return shard(arrays(), batch_size=size, seed=3, remainder=remainder)
    if kind == "PyDataset":
        return shard(Batches(size), remainder=remainder)
    if kind == "workers":
        return shard(Batches(size, workers=2), remainder=remainder)
    if kind == "generator":
        return shard(stream(size))
    if kind == "DataLoader":
        import torch

        pairs = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays()))
        return shard(torch.utils.data.DataLoader(pairs, batch_size=size, shuffle=True), remainder=remainder)
    import tensorflow as tf

    samples = tf.data.Dataset.from_tensor_slices(arrays())
    if kind == "tf.data of unknown length":
        samples = samples.filter(lambda *_: True)
    return shard(samples, shuffle=COUNT, seed=5).batch(size)


def main() -> None:
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    keras.utils.set_random_seed(2)
    inputs = hidden = keras.Input((4,))
    hidden = layers.Dense(5, activation="tanh")(hidden)
    if options.get("random", True):
        hidden = layers.Dropout(0.2)(layers.BatchNormalization()(hidden))
    model = Recording(inputs, layers.Dense(1)(hidden))
    passes = options.get("passes")
    kind = getattr(keras.optimizers, options.get("optimizer", "Adam"))
    optimizer = kind(0.01, gradient_accumulation_steps=passes)
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=True)
    model.seen = []
    interrupting = Interrupting()
    backup = keras.callbacks.BackupAndRestore(options["folder"], save_freq=options.get("every", "epoch"))
    broadcast = BroadcastCallback(**options.get("broadcast", {}))
    lowering = keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=100.0)  # behind the second epoch
    callbacks = [broadcast, backup, lowering, interrupting, MetricAverageCallback()]
    callbacks += [LearningRateWarmupCallback(2)] if options.get("warm-up", True) else []
    size = max(TOGETHER // ring.size(), 1)
    data = data_of(options["kind"], size)
    x, y = arrays()
    history = model.fit(
        data,
        epochs=EPOCHS,
        steps_per_epoch=options.get("steps"),
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        validation_data=shard((x, y), shuffle=False, remainder="keep"),
    ).history
    report("weights", [weight.tobytes().hex() for weight in model.get_weights()])
    report("numeric", [weight.tolist() for weight in model.get_weights()])
    report("history", history)
    report("rates", interrupting.rates)
    report("left", os.path.exists(options["folder"]))


if __name__ == "__main__":
    ring.init(ranks=int(os.environ["TEST_RANKS"]), **options.get("init", {}))
    main()
