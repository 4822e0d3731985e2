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
