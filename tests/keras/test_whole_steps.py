"""A `fit` whose steps have all of their samples while ranks are lost or leave: weights are those of one process."""

import json

import pytest

from tests.keras.launches import BACKENDS
from tests.launch import run_ranks

SCRIPT = """
import json
import os
import keras
import numpy as np
import ring_plugins as ring
from ring_plugins.core.base.errors import RingError
from ring_plugins.keras import BroadcastCallback, MetricAverageCallback, shard
from ring_plugins.keras.shard import ShardedArrays
from tests.mortal import end_at
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure="continue")
me, deaths, history = ring.rank(), json.loads(os.environ["TEST_DEATHS"]), []
x = np.random.default_rng(1).normal(size=(70, 3)).astype("float32")
data = x, np.tanh(x[:, :1])


def fitted(data, *callbacks, **options):
    keras.utils.set_random_seed(1)
    executed = options.pop("steps_per_execution", 1)
    hidden = keras.layers.Dense(4, "tanh")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.05, **options), "mse", metrics=["mae"], steps_per_execution=executed)
    found = model.fit(data, epochs=3, verbose=0, shuffle=False, callbacks=[*callbacks])
    return np.concatenate([weight.ravel() for weight in model.get_weights()]), found.history


class Dies(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        step, point = deaths.get(str(me), (None, ""))
        if len(history) == step:
            end_at(point)

    def on_train_batch_end(self, batch, logs=None):
        history.append(ring.size())


inputs = keras.Input((3,))
try:
    own = fitted(shard(data, global_batch_size=16, seed=2), Dies(), MetricAverageCallback(), BroadcastCallback())
    alone = fitted(ShardedArrays(data, 16, 0, 1, True, 2, "drop"))
    report("errors", [float(abs(own[0] - alone[0]).max()), abs(own[1]["mae"][-1] / alone[1]["mae"][-1] - 1)], me)
    report("equal", all((own[0] == other).all() for other in ring.all_gather_object(own[0])), me)
    report("history", history, me)
    refused = []
    for divided, options in (
        (shard(data, global_batch_size=23, remainder="keep"), {}),  # of 70, one is left
        (shard(data, global_batch_size=15), {"gradient_accumulation_steps": 2}),
        (shard(data, global_batch_size=16), {"steps_per_execution": 1 + (keras.backend.backend() != "torch")}),
    ):
        try:
            fitted(divided, BroadcastCallback(), **options)
        except RingError as error:
            refused.append(str(error))
    report("refused", refused, me)
    weights, divided = np.zeros((3, 1), "float32"), shard(data, global_batch_size=16, seed=2)
    for step in range(2 * len(divided)):  # a loop as in docs/batch_size.md
        if (me, step) == (3, 5) and deaths["1"][1] != "SIGTERM":
            end_at(deaths["1"][1])
        while True:
            ranks, (x, y) = ring.size(), divided[step % len(divided)]
            sums = ring.all_reduce(2 * x.T @ (x @ weights - y), ring.SUM)
            if ring.size() == ranks:
                break
        weights -= 0.1 * sums / 16
    expected, whole = np.zeros((3, 1), "float32"), ShardedArrays(data, 16, 0, 1, True, 2, "drop")
    for step in range(2 * len(divided)):
        x, y = whole[step % len(divided)]
        expected -= 0.1 * 2 * x.T @ (x @ expected - y) / 16
    report("by hand", [float(abs(weights - expected).max()), ring.size()], me)
except SystemExit:
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "point"),
    [*((backend, point) for backend in BACKENDS for point in ("barrier 2 in", "now")), ("torch", "SIGTERM")],
)
def test_steps_of_a_global_batch_have_all_of_their_samples_when_a_rank_is_lost_or_leaves(backend, point):
    env = {"TEST_DEATHS": json.dumps({"1": [6, point]}), "KERAS_BACKEND": backend}
    result = run_ranks(SCRIPT, 4, env=env, timeout=240)
    if point != "SIGTERM":
        assert all(error < 1e-6 and size == 2 for error, size in result.values("by hand"))
        assert len(result.values("by hand")) == 2
    for rank in (0, 2, 3):
        found = result.reports[rank]
        assert found["equal"] and found["errors"][0] < 1e-6 and found["errors"][1] < 1e-5, str(result)
        assert found["history"][:6] == [4] * 6 and found["history"][8:] == [3] * 4
        keeps, *several = found["refused"]
        assert "the last step of an epoch has fewer samples than there are ranks" in keeps
        assert len(several) == 1 + (backend != "torch"), "on torch Keras itself rejects steps_per_execution"
        assert all("leave gradient_accumulation_steps, steps_per_execution" in text for text in several)
