"""Data divided among ranks."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.keras import BroadcastCallback, MetricAverageCallback, shard
from ring_plugins.keras.shard import ShardedArrays
from tests.keras.behaviors import behavior, error_of


@behavior
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


@behavior
def global_batch() -> Any:
    x = np.random.default_rng(1).normal(size=(30, 3)).astype("float32")

    def fitted(data: Any, *callbacks: Any) -> list[float]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
        model.fit(data, epochs=3, verbose=0, shuffle=False, callbacks=list(callbacks))
        return [float(one) for weight in model.get_weights() for one in weight.ravel()]

    own = fitted(shard((x, x[:, :1]), global_batch_size=8, seed=2), BroadcastCallback())
    expected = fitted(ShardedArrays((x, x[:, :1]), 8, 0, 1, True, 2, "drop"))
    with mock.patch.object(current(), "replaces", True):
        recovers = error_of(lambda: shard(x, global_batch_size=8))
    return {
        "error": max(abs(one - other) for one, other in zip(own, expected, strict=True)),
        "errors": [
            *(error_of(lambda size=size: shard(x, global_batch_size=size)) for size in (0, 2.0, 7)),
            error_of(lambda: shard(x, batch_size=4, global_batch_size=8)),
            error_of(lambda: shard((one for one in [x]), global_batch_size=8)),
            recovers,
        ],
    }


@behavior
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
    whole = shard(Batches(), remainder="keep", shuffle=False)
    return {
        "dataset": epochs,
        "padded": [padded[i] for i in range(len(padded))],
        "generator": list(shard(i for i in range(7))),
        "pad": error_of(lambda: shard((i for i in range(7)), remainder="pad")),
        "kept": [whole[i] for i in range(len(whole))],
        "kept of a generator": list(shard((i for i in range(7)), remainder="keep")),
        "few": error_of(lambda: shard(np.zeros((3, 1)), batch_size=4)),
        "lengths": error_of(lambda: shard((np.zeros(8), np.zeros(9)), batch_size=1)),
    }


class Labeled:
    """Like a Series of pandas after `train_test_split`: [indices] takes rows by labels, which are in reverse."""

    def __init__(self, values: np.ndarray) -> None:
        self._values, self.shape, self.iloc = values, values.shape, None

    def __getitem__(self, labels: Any) -> Any:
        return self._values[::-1][labels]

    def to_numpy(self) -> np.ndarray:
        return self._values


@behavior
def arrays_of_other_kinds() -> Any:
    """The rows of arrays of other kinds, beside those of numpy, on this rank."""
    import h5py
    import scipy.sparse

    x = np.arange(1, 14, dtype="float32").reshape(13, 1)
    stored = h5py.File("memory", "w", driver="core", backing_store=False)
    stored["x"] = x
    kinds = {"h5py": stored["x"], "scipy": scipy.sparse.coo_matrix(x), "labels": Labeled(x[:, 0])}
    kinds["tensor"] = keras.ops.convert_to_tensor(x)
    found = {}
    for name, array in kinds.items():
        data = shard({"kind": array, "numpy": x, "none": None}, batch_size=3, remainder="pad")
        batches = [data[number] for number in range(len(data))]
        pairs = [[np.asarray(batch[key]).tolist() for batch in batches] for key in ("kind", "numpy")]
        found[name] = {"same": pairs[0] == pairs[1], "rows": np.ravel(pairs[0]).tolist()}
    stored.close()
    values = x.tolist()
    lists: tuple[Any, ...] = ((values, values), [values], (x, values), (x, 3.0), {}, (None,), None, "abc")
    options: tuple[dict[str, Any], ...] = (
        {"seed": -1}, {"seed": None}, {"seed": "x"}, {"shuffle": "yes"}, {"shuffle": -5}, {"batch_size": 2.5},
        {"batch_size": "8"}, {"batch_size": None}, {"batch_size": True},
    )  # fmt: skip
    rejected = [error_of(functools.partial(shard, data)) for data in lists]
    return found, rejected + [error_of(functools.partial(shard, x, **{"batch_size": 1, **one})) for one in options]


@behavior
def divided_twice() -> Any:
    import torch

    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2)
    arrays = np.zeros((8, 1))
    once = [shard(arrays, batch_size=1), shard(loader), shard(i for i in range(8))]
    return [error_of(functools.partial(shard, part)) for part in once]


@behavior
def orders_after_a_restart() -> Any:
    """Epochs 0 to 2 in one go, and with a break after epoch 0; new data continues where the backup does."""
    x = np.arange(16, dtype="float32").reshape(16, 1)

    class Seen(keras.callbacks.Callback):
        def __init__(self, data: Any) -> None:
            super().__init__()
            self.data, self.orders = data, []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.orders.append([float(v) for i in range(len(self.data)) for v in self.data[i][0].ravel()])

    def train(epochs: int, backup: Any, loader: bool = False) -> Any:
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
        data = shard((x, x), batch_size=2, seed=5)
        seen = Seen(data)
        saving = [keras.callbacks.BackupAndRestore(backup, delete_checkpoint=False)] if backup else []
        model.fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=[*saving, seen, BroadcastCallback()])
        return seen.orders

    backup = mkdtemp()  # of each rank; only the root writes
    return {"whole": train(3, None), "parts": [*train(1, backup), *train(3, backup)]}


class Seeing(keras.Model):
    """Knows which samples it has been trained and tested on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse", run_eagerly=True)
        self.taken: list[float] = []

    def train_step(self, *args: Any) -> Any:
        self._take(args[-1])
        return super().train_step(*args)

    def test_step(self, *args: Any) -> Any:
        self._take(args[-1])
        return super().test_step(*args)

    def _take(self, data: Any) -> None:
        self.taken.extend(map(float, keras.ops.convert_to_numpy(data[0]).ravel()))


class Inside(keras.utils.PyDataset):
    """What a script may make of a part."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> Any:
        return self.part[index]

    def on_epoch_end(self) -> None:
        self.part.on_epoch_end()


def kinds_of_data(count: int) -> dict[str, Any]:
    """What makes parts of `count` samples, two in each step of each rank."""
    import torch

    x = np.arange(count, dtype="float32").reshape(count, 1)

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return count // 2

        def __getitem__(self, index: int) -> Any:
            return x[2 * index : 2 * index + 2], x[2 * index : 2 * index + 2]

    pairs = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(x))
    return {
        "arrays": lambda: shard((x, x), batch_size=2, seed=5),
        "inside": lambda: Inside(shard((x, x), batch_size=2, seed=5)),
        "batches": lambda: shard(Batches(), seed=3),
        "loader": lambda: shard(torch.utils.data.DataLoader(pairs, batch_size=2, shuffle=True), seed=1),
    }


def taken_in_epochs(data: Any, **options: Any) -> list[list[float]]:
    """Samples that each epoch of a `fit` took."""
    inputs = keras.Input((1,))
    model = Seeing(inputs, layers.Dense(1)(inputs))
    found: list[Any] = []
    begin = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: model.taken.clear(),
        on_epoch_end=lambda epoch, logs: found.append([*model.taken]),
    )
    model.fit(data, verbose=0, shuffle=False, callbacks=[begin, BroadcastCallback()], **options)
    return found


@behavior
def orders_with_initial_epoch() -> Any:
    """What is trained and validated on in epochs 0 to 3 in one go, and from epoch 2 on: with new and with used data."""
    x = np.arange(19, dtype="float32").reshape(19, 1)

    def train(first: int, last: int, data: Any, validation: Any) -> list[Any]:
        return taken_in_epochs(data, validation_data=validation, epochs=last, initial_epoch=first)

    found = {}
    for kind, make in kinds_of_data(19).items():
        data, validation = make(), shard((x[::-1], x), batch_size=3, seed=2)
        parts = [train(0, 2, data, validation), train(2, 4, data, validation)]
        found[kind] = [train(0, 4, make(), shard((x[::-1], x), batch_size=3, seed=2)), [*parts[0], *parts[1]]]
        found[kind] += [parts[0] + train(2, 4, make(), shard((x[::-1], x), batch_size=3, seed=2))]
    return found


@behavior
def orders_with_steps_per_epoch() -> Any:
    """24 samples in epochs of 2 steps, two passes over them, and then one more in another fit: all ranks' samples."""
    found = {}
    for kind, make in kinds_of_data(24).items():
        data = make()
        epochs = [taken_in_epochs(data, epochs=count, steps_per_epoch=2) for count in (6, 3)]
        together = zip(*ring.all_gather_object([*epochs[0], *epochs[1]]), strict=True)
        found[kind] = [list(itertools.chain(*parts)) for parts in together]
    return found


@behavior
def orders_after_a_join() -> Any:
    """Rank 0 has trained, and rank 1 goes on with its orders: what both take then, and what rank 1 rejects."""
    import torch

    numbers = torch.utils.data.TensorDataset(torch.arange(16))
    module = sys.modules[shard.__module__]
    with (
        mock.patch.object(module, "_orders", weakref.WeakValueDictionary()),
        mock.patch.object(module, "_numbers", itertools.count()),
    ):
        parts = [shard(np.arange(16), batch_size=2, seed=seed) for seed in (0, 1)]
        loader = shard(torch.utils.data.DataLoader(numbers, batch_size=2, shuffle=True))
        for part in parts[: 2 * (1 - ring.rank())]:
            part.on_epoch_end()
            list(loader)
            parts[0].on_epoch_end()
        places = ring.broadcast_object(module.places_in_orders(), 0)
        if ring.rank() == 1:
            module.go_on_in_orders(places)
        taken = [[int(v) for batch in loader for v in batch[0]]]
        for part in parts:
            part.on_epoch_end()
            taken.append([int(v) for i in range(len(part)) for v in part[i]])
        wrong = {0: ((16, 1), 0, False)}
        return {"taken": taken, "other data": error_of(lambda: module.go_on_in_orders(wrong))}


@behavior
def sharded_data_loader() -> Any:
    import torch

    def epoch(loader: Any) -> Any:
        return [int(v) for batch in loader for v in batch[0]]

    numbers = torch.utils.data.TensorDataset(torch.arange(13))
    shuffled = shard(torch.utils.data.DataLoader(numbers, batch_size=3, shuffle=True))
    plain = shard(torch.utils.data.DataLoader(numbers, batch_size=3), remainder="keep")
    return {"epochs": [epoch(shuffled), epoch(shuffled)], "plain": [epoch(plain), epoch(plain)], "steps": len(shuffled)}


@behavior
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
