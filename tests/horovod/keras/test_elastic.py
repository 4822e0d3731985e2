"""A `fit` of Horovod's elastic training begins again when a rank is killed."""

from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import ArgumentError
from tests.launch import run_ranks, slowness

SCRIPT = """
import os
import signal
import time

import keras
import numpy as np

import ring_plugins as ring
import ring_plugins.horovod.keras as hvd
from ring_plugins.core.world import current
from tests.worker import report

EPOCHS = 4
ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure=os.environ["TEST_ON_FAILURE"])
hvd.init()
joins, slot = current().is_joining, hvd.rank()
keras.utils.set_random_seed(slot)
inputs = np.random.default_rng(slot).random((60, 3), np.float32)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size(), 0.5)), loss="mse")
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
began, resets, done = [], [], []


def adjust():
    resets.append(hvd.size())
    model.optimizer.learning_rate = 0.01 * hvd.size()


class Watch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not joins and slot == 1 and (state.epoch, batch) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + float(os.environ["TEST_PATIENCE"])
        while resets == [2] and (state.epoch, batch) == (2, 1) and current().replaces:
            if current().elastic.wants_change or time.monotonic() > deadline:
                break
            time.sleep(0.01)

    def on_epoch_end(self, epoch, logs=None):
        done.append(state.epoch)


state.register_reset_callbacks([adjust])
callbacks = [Watch(), *(getattr(hvd.elastic, f"Update{one}StateCallback")(state) for one in ("Epoch", "Batch"))]
callbacks.append(hvd.elastic.CommitStateCallback(state))
if "replace" in os.environ["TEST_ON_FAILURE"]:
    callbacks[:0] = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]


@hvd.elastic.run
def train(state):
    began.append([state.epoch, state.batch, hvd.size()])
    model.fit(inputs, inputs[:, :2], batch_size=5, steps_per_epoch=12 // hvd.size(), epochs=EPOCHS - state.epoch,
              callbacks=callbacks, verbose=0)


train(state)
report("began", began)
report("resets", resets)
report("done", done)
report("rate", float(model.optimizer.learning_rate))
report("weights", [weight.tolist() for weight in model.get_weights()])
"""


def trained(on_failure):
    env = {"TEST_ON_FAILURE": on_failure, "TEST_PATIENCE": str(90 * slowness()), "KERAS_BACKEND": "tensorflow"}
    return run_ranks(SCRIPT, 3, env=env, timeout=240)


def check(result, slots, size):
    found = [result.reports[slot] for slot in slots]
    assert all(one["weights"] == found[0]["weights"] for one in found), str(result)
    assert all(one["rate"] == pytest.approx(0.01 * size) for one in found)
    return found


@pytest.mark.slow
def test_a_fit_begins_again_in_the_epoch_that_was_reached():
    for one in check(trained("continue"), (0, 1), 2):
        assert one["began"] == [[0, 0, 3], [1, 2, 2]] and one["resets"] == [2] and one["done"] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_process_that_takes_the_place_of_a_lost_one_goes_on_with_the_others():
    found = check(trained("replace"), (0, 1, 2), 3)
    for slot, one in enumerate(found):
        began, resets, done = [[2, 1, 3]], [3], [2, 3]
        if slot != 1:
            began, resets, done = [[0, 0, 3], [1, 2, 2], *began], [2, 3], [0, 1, 2, 3]
        assert (one["began"], one["resets"], one["done"]) == (began, resets, done)


@pytest.mark.slow  # it imports Keras
def test_callbacks_tell_the_state_where_the_training_is():
    pytest.importorskip("keras")
    from ring_plugins.horovod.keras import elastic

    commits, state = [], SimpleNamespace(epoch=2, batch=0, commit=lambda: commits.append((state.epoch, state.batch)))
    one, two = elastic.UpdateEpochStateCallback(state), elastic.UpdateBatchStateCallback(state)
    three = elastic.CommitStateCallback(state, batches_per_commit=2)
    for callback in (one, two, three):
        callback.on_train_begin()
    for epoch in range(2):
        for batch in range(3):
            for callback in (one, two, three):
                callback.on_train_batch_end(batch)
        for callback in (one, two, three):
            callback.on_epoch_end(epoch)
    assert commits == [(2, 1), (3, 0), (3, 0), (3, 2), (4, 0)]


@pytest.mark.slow  # it imports Keras
def test_a_model_that_is_not_built_is_rejected():
    keras = pytest.importorskip("keras")
    from ring_plugins.horovod.keras import elastic

    with pytest.raises(ArgumentError, match=r"begin it with keras\.Input"):
        elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
