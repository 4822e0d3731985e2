"""Horovod's operations on TensorFlow's tensors: values of all types, and errors; test_tensorflow.py has gradients."""

import pytest

from tests.launch import run_ranks

SCRIPT = """
import numpy as np
import tensorflow as tf
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=2)
import ring_plugins.horovod.tensorflow as hvd

rank = hvd.rank()
signed, unsigned = tf.constant([-3 + 2 * rank, 5 - rank], tf.int32), tf.constant([255, 3 * rank], tf.uint8)
report("averages", [hvd.allreduce(x).numpy().tolist() for x in (signed, unsigned)])
report("scaled averages", hvd.allreduce(signed, prescale_factor=1.5, postscale_factor=0.5).numpy().tolist())
report("rows", hvd.reducescatter(signed).numpy().tolist())
half = tf.constant([0.1], tf.float16)
factor = 0.123456
report("half", float(hvd.allreduce(half, op=hvd.Sum, prescale_factor=factor)[0]) / 2 == np.float16(
    np.float32(half.numpy()[0]) * np.float32(factor)))

class Tenths:
    @staticmethod
    def compress(tensor):
        return tf.cast(tensor * 10, tf.int32), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tf.cast(tensor, ctx) / 10

report("own compressor", hvd.allreduce(tf.constant([0.54]), op=hvd.Sum, compression=Tenths).numpy().tolist())

@tf.function(jit_compile=True)
def compiled():
    return hvd.allreduce(tf.ones(3))

caught = []
for kind, call in (
    (tf.errors.FailedPreconditionError, lambda: hvd.allreduce(tf.ones(2 + rank))),
    (tf.errors.FailedPreconditionError, lambda: hvd.broadcast(tf.ones(2), root_rank=rank)),
    (tf.errors.InvalidArgumentError, lambda: hvd.alltoall(tf.ones(3))),
    (tf.errors.InvalidArgumentError, lambda: hvd.grouped_reducescatter([tf.constant(1.0)])),
    (NotImplementedError, lambda: hvd.allreduce(tf.IndexedSlices(tf.ones((1, 2)), [rank], [4, 2]), op=hvd.Max)),
    (RuntimeError, lambda: hvd.broadcast_global_variables(0)),
    (ring.ArgumentError, compiled),
):
    try:
        call()
    except kind as error:
        caught.append(str(error) if isinstance(error, ring.RingError) else "another's")
report("caught", caught)
report("goes on", float(hvd.allreduce(tf.constant(float(rank)), op=hvd.Sum)))
"""


@pytest.mark.slow
def test_values_and_errors_are_horovods():
    result = run_ranks(SCRIPT, 2, env={"KERAS_BACKEND": "tensorflow"})
    # Sums wrap, and are divided toward zero: -4 / 2, 9 / 2; 254 / 2, 3 / 2
    assert result.values("averages") == [[[-2, 4], [127, 1]]] * 2
    # 1.5 * -3 = -4, 1.5 * -1 = -1; 1.5 * 5 = 7, 1.5 * 4 = 6; a quarter of -5 and 13
    assert result.values("scaled averages") == [[-1, 3]] * 2
    assert result.values("rows") == [[-2], [4]]
    assert result.values("half") == [True, True]
    assert result.values("own compressor") == [[1.0]] * 2
    for texts in result.values("caught"):
        assert len(texts) == 7
        assert "another's" not in texts
        assert "jit_compile" in texts[6]
        assert "hvd.allreduce" in texts[6]
    assert result.values("goes on") == [1.0, 1.0]


SETS = """
import keras
import numpy as np
import tensorflow as tf
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=3)
import ring_plugins.horovod.tensorflow as hvd
from ring_plugins.horovod import keras as of_keras

rank = hvd.rank()
some, others = hvd.add_process_set([0, 2]), hvd.add_process_set([1])
mine = some if some.included() else others
x = tf.Variable([[1.0 + rank], [2.0]])

def with_gradient(function):
    with tf.GradientTape() as tape:
        result = function(x * 1.0)
        loss = tf.reduce_sum(result) * (rank + 1)
    return [tf.reshape(one, [-1]).numpy().tolist() for one in (result, tape.gradient(loss, x))]

operations = {
    "allreduce": lambda x: hvd.allreduce(x, process_set=mine),
    "allgather": lambda x: hvd.allgather(x, process_set=mine),
    "broadcast": lambda x: hvd.broadcast(x, max(mine.ranks), process_set=mine),
    "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=mine),
}
for name, one in operations.items():
    report(name, with_gradient(one))
if rank != 1:
    report("alltoall", with_gradient(lambda x: hvd.alltoall(x, process_set=mine)))
report("integers", hvd.allreduce(tf.constant([rank + 1]), process_set=mine).numpy().tolist())
report("keras", of_keras.allreduce(np.array([rank + 1]), process_set=mine).tolist())
report("numbers", [int(hvd.size_op(some.process_set_id)), int(hvd.process_set_included_op(some.process_set_id))])
report("all", with_gradient(lambda x: hvd.allreduce(x, process_set=hvd.global_process_set)))

variable = tf.Variable([float(rank)])
hvd.broadcast_variables([variable], root_rank=max(mine.ranks), process_set=mine)
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(variable) * (rank + 1)
total = hvd.DistributedGradientTape(tape, process_set=mine, op=hvd.Sum).gradient(loss, variable)
report("tape", total.numpy().tolist())
report("variable", variable.numpy().tolist())
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
model.layers[0].set_weights([np.ones((1, 1))])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=mine)
optimizer.apply([tf.constant([[rank + 1.0]])], model.trainable_variables)
report("optimizer", round(float(model.get_weights()[0][0, 0]), 5))
try:
    hvd.allreduce(x, process_set=others if mine is some else some)
except tf.errors.InvalidArgumentError as error:
    report("outside", str(error))
report("goes on", float(hvd.allreduce(tf.constant(float(rank)), op=hvd.Sum)))
"""


@pytest.mark.slow
def test_process_sets_are_independent_of_each_other():
    result = run_ranks(SETS, 3, env={"KERAS_BACKEND": "tensorflow"})
    # Gradients have Horovod's factors: see collectives.py
    assert result.values("allreduce") == [[[2, 2], [2, 2]], [[2, 2], [2, 2]], [[2, 2], [2, 2]]]
    assert result.values("allgather") == [[[1, 2, 3, 2], [2, 2]], [[2, 2], [2, 2]], [[1, 2, 3, 2], [2, 2]]]
    assert result.values("broadcast") == [[[3, 2], [0, 0]], [[2, 2], [2, 2]], [[3, 2], [2, 2]]]
    assert result.values("reducescatter") == [[[4], [2, 6]], [[2, 2], [2, 2]], [[4], [2, 6]]]
    assert result.values("alltoall") == [[[1, 3], [1, 3]], [[2, 2], [1, 3]]]
    assert result.values("integers") == result.values("keras") == [[2], [2], [2]]
    assert result.values("numbers") == [[2, 1], [2, 0], [2, 1]]
    assert result.values("all") == [[[2, 2], [2, 2]]] * 3
    assert result.values("tape") == [[4], [2], [4]]
    assert result.values("variable") == [[2], [1], [2]]
    assert result.values("optimizer") == [0.8, 0.8, 0.8]
    assert len(result.values("outside")) == 3
    assert result.values("goes on") == [3, 3, 3]
