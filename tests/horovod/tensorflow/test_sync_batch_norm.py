"""The batches of all ranks, normalized as one."""

import pytest

from tests.launch import run_ranks

SCRIPT = """
import keras
import numpy as np
import tensorflow as tf
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=2)
import ring_plugins.horovod.tensorflow as hvd

rank = hvd.rank()
x = np.random.default_rng(0).normal(size=(9, 3)).astype("float32")
mine = x[:4] if rank == 0 else x[4:]
layer, other = hvd.SyncBatchNormalization(), hvd.SyncBatchNormalization(axis=1, name="second")
alone = keras.layers.BatchNormalization()

def of(layers, inputs):
    inputs = tf.constant(inputs)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        found = inputs
        for one in layers:
            found = one(found, training=True)
        loss = tf.reduce_sum(found ** 3)
    return found.numpy(), tape.gradient(loss, inputs).numpy()

(found, gradient), (wanted, wanted_gradient) = of([layer], mine), of([alone], x)
part = slice(0, 4) if rank == 0 else slice(4, 9)
report("apart", [float(np.abs(found - wanted[part]).max()), float(np.abs(gradient - wanted_gradient[part]).max())])
report("moving", float(np.abs(layer.moving_variance.numpy() - alone.moving_variance.numpy()).max()))
traced = tf.function(lambda x: layer(other(x, training=True), training=True))(tf.constant(mine))
report("traced", [int(traced.shape[0]), hash(layer.moving_mean.numpy().tobytes())])
again = keras.layers.deserialize(keras.layers.serialize(other))
report("again", [type(again) is hvd.SyncBatchNormalization, again.axis])
report("name", layer.name)
try:
    hvd.SyncBatchNormalization(fused=True)
except ring.ArgumentError as error:
    report("fused", str(error))
"""


@pytest.mark.slow
def test_moments_are_those_of_all_ranks_batches():
    result = run_ranks(SCRIPT, 2, env={"KERAS_BACKEND": "tensorflow", "PYTHONHASHSEED": "0"})
    assert max(map(max, result.values("apart"))) < 1e-5
    assert max(result.values("moving")) < 1e-6
    (rows, mean), (other_rows, other_mean) = result.values("traced")
    assert (rows, other_rows) == (4, 5)
    assert mean == other_mean
    assert result.values("again") == [[True, 1]] * 2
    assert result.values("name") == ["sync_batch_normalization"] * 2
    assert "fused=True" in result.values("fused")[0]
