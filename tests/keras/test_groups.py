"""Two groups of two ranks each train at once: each as one process on the data of its group, with metrics of its own."""

import pytest

from tests.keras.launches import BACKENDS, QUICK, QUIET
from tests.launch import run_ranks

SCRIPT = """
import os
import sys

import numpy as np

import ring_plugins as ring

ring.init(ranks=4)
import keras
from keras import layers

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.keras import (
    BroadcastCallback, DistributedOptimizer, LearningRateWarmupCallback, MetricAverageCallback, SyncBatchNormalization,
    broadcast_variables, shard,
)
from tests.worker import report

ACROSS, BESIDE = [[0, 2], [1, 3]], [[0, 1], [3, 2]]


def model_of(which, own_layer=False):
    keras.utils.set_random_seed(which)
    norm = SyncBatchNormalization if own_layer else layers.BatchNormalization
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh"), norm(momentum=0.5), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss="mse", metrics=["mae"])
    return model


def data_of(which):
    x = np.random.default_rng(which).normal(size=(64, 5)).astype("float32")
    return x, x.sum(1, keepdims=True)


def refusal(call):
    try:
        call()
    except ArgumentError as error:
        return str(error)
    return ""


def weights_of(model):
    return np.concatenate([np.ravel(value) for value in model.get_weights()])


def trained(ranks, which, shard_optimizer=False):
    group = ring.Group(ranks)
    x, y = data_of(which)
    data = shard((x, y), batch_size=8, shuffle=False, group=group)
    model = model_of(which if group.rank == 0 else 7, own_layer=shard_optimizer)
    history = model.fit(
        data, epochs=2, shuffle=False, verbose=2, validation_data=data,
        callbacks=[
            BroadcastCallback(synchronized_batch_norm=True, group=group, shard_optimizer=shard_optimizer),
            MetricAverageCallback(), LearningRateWarmupCallback(1, momentum_correction=False),
        ],
    )
    alone = model_of(which)
    seen = alone.fit(
        x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, validation_data=(x, y),
        callbacks=[Warmup()],
    )
    own = weights_of(model)
    metrics = [
        float(np.abs(np.subtract(history.history[key], seen.history[key])).max())
        for key in ("mae", "val_loss", "val_mae")
    ]
    evaluated = model.evaluate(data, verbose=0, callbacks=[MetricAverageCallback(group=group)])
    by_default = model.evaluate(data, verbose=0, callbacks=[MetricAverageCallback()])
    return {
        "evaluated alike": by_default == evaluated,
        "equal": all(np.array_equal(own, other) for other in ring.all_gather_object(own, group=group)),
        "error": float(np.abs(own - weights_of(alone)).max()),
        "metrics": max(*metrics, abs(evaluated[1] - seen.history["val_mae"][-1])),
        "steps": len(data),
        "says": refusal(lambda: BroadcastCallback(root_rank=group.ranks[0] ^ 3, group=group).set_model(model)),
    }


class Warmup(keras.callbacks.Callback):
    \"\"\"What the warm-up does for two ranks.\"\"\"

    def on_train_batch_begin(self, batch, logs=None):
        epoch = self.epoch + batch / 4
        self.model.optimizer.learning_rate = 0.02 * (1 + min(epoch, 1.0))

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


for groups in (ACROSS, BESIDE):
    which = next(i for i, ranks in enumerate(groups) if ring.rank() in ranks)
    report(str(groups), trained(groups[which], which, shard_optimizer=groups is BESIDE))

other = ring.Group([1, 2] if ring.rank() in (0, 3) else [0, 3])  # of which this rank is none
calls = {
    "DistributedOptimizer": lambda: DistributedOptimizer(keras.optimizers.SGD(), group=other),
    "BroadcastCallback": lambda: BroadcastCallback(group=other).set_model(model_of(0)),
    "MetricAverageCallback": lambda: model_of(0).evaluate(*data_of(0), callbacks=[MetricAverageCallback(group=other)]),
    "shard": lambda: shard(data_of(0), group=other),
    "broadcast_variables": lambda: broadcast_variables(model_of(0), group=other),
}
report("refusals", {name: refusal(call) for name, call in calls.items()})

mine = ring.Group([0, 1] if ring.rank() < 2 else [2, 3])
optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), group=mine)
weight = keras.Variable(np.zeros(3, "float32"))
optimizer.build([weight])
optimizer.apply([keras.ops.convert_to_tensor(np.full(3, 1.0 + ring.rank(), "float32"))])
report("applied", float(keras.ops.convert_to_numpy(weight)[0]))
model = model_of(0)
model.optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), group=mine)
report("differs", refusal(lambda: model.fit(*data_of(0), verbose=0, callbacks=[BroadcastCallback()])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_train_at_once_as_one_process_each(backend):
    run = run_ranks(SCRIPT, 4, env={"KERAS_BACKEND": backend, **QUIET, **QUICK}, timeout=300)
    for groups in ("[[0, 2], [1, 3]]", "[[0, 1], [3, 2]]"):
        for found in run.values(groups):
            assert found["equal"] and found["evaluated alike"] and found["steps"] == 4
            assert found["error"] < 1e-5 and found["metrics"] < 1e-5
            assert "is not in the group of ranks" in found["says"]
    for refusals in run.values("refusals"):
        assert all("is not in the group of ranks" in text for text in refusals.values())
    assert run.values("applied") == pytest.approx([-0.15] * 2 + [-0.35] * 2)
    assert all("without this group, but averages in the group of ranks" in text for text in run.values("differs"))
