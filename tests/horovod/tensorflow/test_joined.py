"""A rank that runs out of data before others: `hvd.join` of TensorFlow."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from tests.launch import run_ranks

LOOPS = """
import os
import keras
import numpy as np
import tensorflow as tf
import ring_plugins as ring
from tests.worker import report
import ring_plugins.horovod.tensorflow as hvd

ring.init(ranks=int(os.environ["TEST_RANKS"]))
hvd.init()
rank, size = hvd.rank(), hvd.size()
batches = [2, 5, 3][rank]  # the second rank comes last


def train(compiled, own_optimizer, op):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    if own_optimizer:
        optimizer = hvd.DistributedOptimizer(optimizer, op=op)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - tf.reduce_sum(x, 1, keepdims=True)) ** 2)
        if not own_optimizer:
            tape = hvd.DistributedGradientTape(tape, op=op)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    return model, optimizer, tf.function(step) if compiled else step


def batch(rank, number):
    return tf.constant(np.random.default_rng([rank, number]).normal(size=(8, 3)).astype("float32"))


def alone(factor):
    \"\"\"One process, that counts ranks without data as zeros.\"\"\"
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    for number in range(5):
        total = [tf.zeros_like(v) for v in model.trainable_variables]
        for other, count in enumerate([2, 5, 3][:size]):
            if number < count:
                x = batch(other, number)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - tf.reduce_sum(x, 1, keepdims=True)) ** 2)
                total = [a + b * factor for a, b in zip(total, tape.gradient(loss, model.trainable_variables))]
        optimizer.apply_gradients(zip(total, model.trainable_variables))
    return model, optimizer


def flat(variables):
    return np.concatenate([np.ravel(v) for v in variables])


loops = []
for compiled, own_optimizer, op in ((False, False, hvd.Average), (True, False, hvd.Sum), (True, True, hvd.Average)):
    model, optimizer, step = train(compiled, own_optimizer, op)
    if own_optimizer:
        model.optimizer = optimizer
    for number in range(batches):
        step(batch(rank, number))
    last = hvd.join()
    if not own_optimizer:
        hvd.broadcast_variables(optimizer.variables, root_rank=last)
    weights = flat(model.trainable_variables + optimizer.variables)
    expected_model, expected = alone(1 if op is hvd.Sum else 1 / size)
    error = float(np.abs(weights - flat(expected_model.trainable_variables + expected.variables)).max())
    equal = all(np.array_equal(weights, other) for other in ring.all_gather_object(weights))
    step(batch(rank, 9))  # and all go on
    weights = flat(model.trainable_variables + optimizer.variables)
    goes_on = all(np.array_equal(weights, other) for other in ring.all_gather_object(weights))
    loops.append([last, equal, error < 1e-5, goes_on])
report("loops", loops)
del model, optimizer, step
report("nothing left", hvd.join() < size)
"""


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
def test_ranks_with_fewer_batches_train_to_the_end_of_the_longest(ranks):
    run = run_ranks(LOOPS, ranks, env={"KERAS_BACKEND": "tensorflow"}, timeout=150)
    assert run.values("loops") == [[[1, True, True, True]] * 3] * ranks
    assert run.values("nothing left") == [True] * ranks


@pytest.mark.slow  # it imports TensorFlow
def test_an_error_while_this_rank_takes_part_is_raised_in_join():
    pytest.importorskip("tensorflow")
    from ring_plugins.horovod.tensorflow import joined

    answers = iter([False, False, True])
    waited = Future()
    joined._follow(SimpleNamespace(take_part=lambda: next(answers)), waited)
    assert waited.result() == 2
    waited = Future()
    joined._follow(SimpleNamespace(take_part=lambda: next(answers)), waited)
    assert isinstance(waited.exception(), StopIteration)


def test_an_error_while_optimizers_take_part_is_raised_there(monkeypatch):
    joined = pytest.importorskip("ring_plugins.horovod.tensorflow.joined", reason="TensorFlow is not installed")

    def take_part():
        raise ValueError("no step")

    members = SimpleNamespace(all_gather_object=lambda steps, what: [steps], ranks=(0,))
    exchange = SimpleNamespace(host_buckets=SimpleNamespace(take_part=take_part), communicator=members)
    monkeypatch.setattr(joined, "_in_use", lambda: [(exchange, [])])
    monkeypatch.setattr(joined.host, "follow_names", lambda: None)
    monkeypatch.setattr(joined.basics, "join", lambda device: 0)
    with pytest.raises(ValueError, match="no step"):
        joined.join()
