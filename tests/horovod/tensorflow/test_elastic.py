"""A state of variables of TensorFlow, as a loop with tapes has it."""

from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.joining import training_state
from ring_plugins.horovod import elastic as shared
from tests.launch import run_ranks, slowness


@pytest.mark.slow  # it imports TensorFlow
def test_variables_and_values_are_saved_restored_and_given_to_all(monkeypatch):
    tf = pytest.importorskip("tensorflow")
    from ring_plugins.horovod.tensorflow import elastic

    job = SimpleNamespace(elastic=SimpleNamespace(view=0), replaces=False)
    for module in (shared, training_state, elastic):
        monkeypatch.setattr(module, "current", lambda: job)
    given = []
    monkeypatch.setattr(elastic, "broadcast_all", lambda variables, root: given.append((variables, root)))
    monkeypatch.setattr(elastic.ring, "broadcast_object", lambda value, root: {"batch": 7})
    variable = tf.Variable([1.0, 2.0])
    state = elastic.TensorFlowState([variable], batch=3)
    state.save()
    variable.assign([5.0, 5.0])
    state.batch = 4
    state.restore()
    assert variable.numpy().tolist() == [1, 2] and state.batch == 3
    state.sync()
    assert given == [([variable], 0)] and state.batch == 7
    variable.assign([6.0, 6.0])
    state.restore()
    assert variable.numpy().tolist() == [1, 2] and state.batch == 7
    with pytest.raises(ArgumentError, match="variables is empty"):
        elastic.TensorFlowState([])


SCRIPT = """
import os
import signal
import time

import keras
import numpy as np
import tensorflow as tf

import ring_plugins as ring
import ring_plugins.horovod.tensorflow as hvd
from ring_plugins.core.world import current
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure="replace")
hvd.init()
joins, slot = current().is_joining, hvd.rank()
inputs = tf.constant(np.random.default_rng(slot).random((5, 3), np.float32))
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
optimizer = keras.optimizers.SGD(0.01, 0.5)
state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
began = []


@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(inputs) - inputs[:, :2]) ** 2)
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))


@hvd.elastic.run
def train(state):
    began.append([state.batch, hvd.size()])
    for state.batch in range(state.batch, 8):
        if not joins and slot == 1 and state.batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + float(os.environ["TEST_PATIENCE"])
        while hvd.size() < 3 and state.batch == 5 and not current().elastic.wants_change:
            time.sleep(0.01)
            assert time.monotonic() < deadline
        step()
        state.commit()


train(state)
try:
    hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum)
except ring.ArgumentError as error:
    report("sum", str(error))
report("began", began)
report("weights", [weight.tolist() for weight in model.get_weights()])
"""


@pytest.mark.slow
def test_a_process_takes_the_place_of_a_lost_one_in_a_loop_with_a_tape():
    env = {"TEST_PATIENCE": str(90 * slowness()), "KERAS_BACKEND": "tensorflow"}
    result = run_ranks(SCRIPT, 3, env=env, timeout=240)
    weights = result.values("weights")
    assert len(weights) == 3 and weights == [weights[0]] * 3, str(result)
    began = result.values("began")
    assert began[0][0] == [0, 3] and began[0][1][1] == 2 and began[0][-1][1] == 3
    assert began[1] == began[0][-1:] and began[2] == began[0]
    assert "multiplies averages by 3" in result.values("sum")[0]
