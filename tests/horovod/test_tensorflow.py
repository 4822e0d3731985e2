"""A loop with a tape for Horovod's TensorFlow, against one process."""

import pytest

from tests.launch import run_ranks

TAPE = """
import functools
import keras
import numpy as np
import tensorflow as tf
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=2)
import ring_plugins.horovod.tensorflow as hvd

from ring_plugins.horovod.tensorflow.keras import callbacks  # has the name of Keras, which the tape needs
from ring_plugins.horovod import keras as of_keras

hvd.init()
rank = hvd.rank()
report("scaled integers", [
    np.asarray(allreduce(np.array([3, 10]), op=hvd.Sum, **factor)).tolist()
    for allreduce in (hvd.allreduce, of_keras.allreduce)
    for factor in ({"prescale_factor": 0.5}, {"postscale_factor": 0.5}, {"prescale_factor": 2.5})
])
keras.utils.set_random_seed(rank)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])
optimizer = keras.optimizers.SGD(0.1)
optimizer.build(model.trainable_variables)
hvd.broadcast_variables(model.variables, root_rank=0)
hvd.broadcast_variables(optimizer.variables, root_rank=0)

@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return hvd.allreduce(loss, name="loss")

rng = np.random.default_rng(0)
x, y = rng.normal(size=(6, 8, 4)).astype("float32"), rng.normal(size=(6, 8, 2)).astype("float32")
start = model.get_weights()
losses = [float(step(x[i, rank::2], y[i, rank::2])) for i in range(6)]
trained = model.get_weights()
report("bits", [hash(value.tobytes()) for value in trained])
report("losses", losses)
model.set_weights(start)
alone = []
for i in range(6):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x[i]) - y[i]))
    alone.append(float(loss))
    for variable, gradient in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables)):
        variable.assign_sub(0.1 * gradient)
report("apart", max(float(np.abs(a - b).max()) for a, b in zip(trained, model.get_weights())))
report("losses apart", float(np.abs(np.array(losses) - alone).max()))

# The first batch broadcasts inside the function, as in Horovod's own examples
net = keras.Sequential([keras.layers.Dense(3, activation="relu"), keras.layers.Dense(2)])
adam = keras.optimizers.Adam(0.01)

@tf.function
def training_step(x, y, first_batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(net(x, training=True) - y))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, net.trainable_variables)
    adam.apply_gradients(zip(gradients, net.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(net.variables, root_rank=0)
        hvd.broadcast_variables(adam.variables(), root_rank=0)
    return loss

for i in range(3):
    training_step(x[i, rank::2], y[i, rank::2], i == 0)
report("broadcast in a function", [hash(v.numpy().tobytes()) for v in net.variables + adam.variables])

try:
    hvd.DistributedGradientTape(None)
except ring.ArgumentError as error:
    report("no tape", str(error))

# Averages that a script keeps are not overwritten by the next step's.
variable = tf.Variable([1.0, 2.0])
kept = []
for factor in (1.0, 10.0):
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(variable * variable) * (rank + 1) * factor
    kept.append(tape.gradient(loss, variable))
report("kept", [gradient.numpy().tolist() for gradient in kept])

# Sparse, unused, and structures
table, unused = tf.Variable(tf.ones((4, 2))), tf.Variable(1.0)
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(tf.gather(table, [rank, rank + 1]))
found = hvd.DistributedGradientTape(tape).gradient(loss, {"table": table, "unused": unused})
report("sparse", tf.convert_to_tensor(found["table"]).numpy().tolist())
report("unused", found["unused"] is None)

with tf.GradientTape() as tape:
    loss = tf.reduce_sum(hvd.allreduce(variable * (rank + 1), op=hvd.Sum))
report("gradient", tape.gradient(loss, variable).numpy().tolist())

# Values and gradients of operations, eagerly and in a function
weight = tf.Variable([1.0, 1.0])

def with_gradient(function):
    with tf.GradientTape() as tape:
        result = function(weight * (rank + 1.0))
        loss = tf.reduce_sum(result * tf.range(1.0, 1.0 + tf.cast(tf.shape(result)[0], tf.float32)))
    return result, tape.gradient(loss, weight)

operations = (
    hvd.allreduce, hvd.allgather, functools.partial(hvd.broadcast, root_rank=1), hvd.alltoall, hvd.reducescatter,
    functools.partial(hvd.reducescatter, op=hvd.Sum, prescale_factor=0.5),
    lambda x: hvd.alltoall(x, splits=[2, 0])[0],
    lambda x: tf.concat(hvd.grouped_allgather([x, x]), 0),
    lambda x: tf.concat(hvd.grouped_reducescatter([x, x], compression=hvd.Compression.fp16), 0),
)

def values_and_gradients():
    return [with_gradient(operation) for operation in operations]

eager, traced = values_and_gradients(), tf.function(values_and_gradients)()
for key, found in (("eager", eager), ("traced", traced)):
    report(key, [[one.numpy().tolist() for one in pair] for pair in found])
report("splits", hvd.alltoall(tf.range(3), splits=tf.constant([1, 2]))[1].numpy().tolist())
report("unequal", hvd.allgather(tf.ones((1 + rank, 2))).shape[0])
rows = hvd.allreduce(tf.IndexedSlices(tf.ones((1, 2)), [rank], [4, 2]))
report("rows", [rows.values.numpy().tolist(), rows.indices.numpy().tolist()])
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(tf.gather(table, [rank]))
dense = hvd.DistributedGradientTape(tape, sparse_as_dense=True).gradient(loss, table)
report("dense", dense.numpy()[:2].tolist())
report("objects", [hvd.broadcast_object({"rank": rank}, root_rank=1), hvd.allgather_object(rank)])
rejected = []
for call in (
    lambda: hvd.DistributedGradientTape(tape, op=hvd.Min),
    lambda: hvd.allreduce(rows, op=hvd.Max),
    lambda: hvd.broadcast_global_variables(0),
    lambda: hvd.broadcast_variables(keras.Sequential([keras.layers.Dense(1)]).variables, root_rank=0),
):
    try:
        call()
    except (ring.ArgumentError, AttributeError) as error:
        rejected.append(str(error))
report("rejected", rejected)
"""


@pytest.mark.slow
def test_a_loop_for_horovod_with_tensorflow():
    result = run_ranks(TAPE, 2, env={"KERAS_BACKEND": "tensorflow", "PYTHONHASHSEED": "0"})
    for key in ("bits", "broadcast in a function"):
        assert result.values(key)[0] == result.values(key)[1], key
    assert max(result.values("apart") + result.values("losses apart")) < 1e-6
    assert result.values("scaled integers") == [[[2, 10], [3, 10], [14, 50]] * 2] * 2
    assert result.values("no tape") == ["gradtape=None is not a tf.GradientTape; pass the tape of the loss."] * 2
    assert result.values("kept") == [[[3, 6], [30, 60]]] * 2
    assert result.values("sparse") == [[[0.5, 0.5], [1, 1], [0.5, 0.5], [0, 0]]] * 2
    assert result.values("unused") == [True, True]
    assert result.values("gradient") == [[2, 2], [4, 4]]
    for key in ("eager", "traced"):  # the factors of Horovod 0.28: see collectives.py
        assert result.values(key) == [
            [
                [[1.5, 1.5], [1, 2]],
                [[1, 1, 2, 2], [1, 2]],
                [[2, 2], [0, 0]],
                [[1, 2], [1, 1]],
                [[1.5], [1, 1]],
                [[1.5], [1, 1]],
                [[1, 1, 2, 2], [1, 2]],
                [[1, 1, 2, 2] * 2, [6, 8]],
                [[1.5, 1.5], [3, 3]],
            ],
            [
                [[1.5, 1.5], [2, 4]],
                [[1, 1, 2, 2], [6, 8]],
                [[2, 2], [2, 4]],
                [[1, 2], [4, 4]],
                [[1.5], [2, 2]],
                [[1.5], [2, 2]],
                [[], [6, 8]],
                [[1, 1, 2, 2] * 2, [20, 24]],
                [[1.5, 1.5], [6, 6]],
            ],
        ], key
    assert result.values("splits") == [[1, 1], [2, 2]]
    assert result.values("unequal") == [3, 3]
    assert result.values("rows") == [[[[0.5, 0.5]] * 2, [0, 1]]] * 2
    assert result.values("dense") == [[[0.5, 0.5]] * 2] * 2
    assert result.values("objects") == [[{"rank": 1}, [0, 1]]] * 2
    for texts in result.values("rejected"):
        assert len(texts) == 4, texts
        assert texts[3].startswith("variables is empty. Models and optimizers have their variables once they are built")
        assert "hvd.Sum" in texts[0] and "convert_to_tensor" in texts[1] and "broadcast_variables" in texts[2]
    assert "AutoGraph" not in result.output
