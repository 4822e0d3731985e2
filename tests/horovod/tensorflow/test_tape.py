"""Tapes that sum, and that leave some gradients to their rank; test_tensorflow.py has averages."""

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
shared, own, unused = tf.Variable([1.0, 2.0]), tf.Variable([3.0]), tf.Variable(1.0)
table = tf.Variable(tf.ones((3, 1)))
sources = {"shared": shared, "own": own, "unused": unused, "table": table}

def gradients(locals_=(), **options):
    with tf.GradientTape() as tape:
        rows = tf.gather(table, [rank, 2])
        loss = (tf.reduce_sum(shared * shared) + tf.reduce_sum(own) + tf.reduce_sum(rows)) * (rank + 1)
    tape = hvd.DistributedGradientTape(tape, **options)
    for one in locals_:
        tape.register_local_source(one)
    found = tape.gradient(loss, sources, use_generic_names=True)
    return {
        key: None if one is None else tf.convert_to_tensor(one).numpy().ravel().tolist() for key, one in found.items()
    }

report("average", gradients())
report("sum", gradients(op=hvd.Sum))
report("sum and local", gradients([own, unused], op=hvd.Sum))
report("local", gradients([own, unused, table]))
report("not scaled", gradients([own], scale_local_gradients=False))

layers = [keras.layers.Dense(1), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((1,)), *layers])
for layer in layers:
    layer.set_weights([np.ones((1, 1)), np.zeros(1)])
with tf.GradientTape(persistent=True) as tape:
    loss = tf.reduce_sum(model(tf.ones((1, 1)))) * (rank + 1)
partial = hvd.PartialDistributedGradientTape(tape, local_layers=layers[0])
mine, all_ranks = partial.get_local_and_global_gradients(loss, model.trainable_variables)
report("partial", [[float(tf.reduce_sum(gradient)) for _, gradient in pairs] for pairs in (mine, all_ranks)])
rejected = []
for call in (
    lambda: hvd.DistributedGradientTape(tape, op=hvd.Max),
    lambda: hvd.DistributedGradientTape(tape, op=hvd.Sum, gradient_predivide_factor=2.0),
    lambda: hvd.PartialDistributedGradientTape(tape, local_layers=[model, 1]),
):
    try:
        call()
    except ValueError as error:
        rejected.append(str(error))
report("rejected", rejected)
"""


@pytest.mark.slow
def test_sums_and_local_sources():
    result = run_ranks(SCRIPT, 2, env={"KERAS_BACKEND": "tensorflow"})
    average = {"shared": [3, 6], "own": [1.5], "unused": None, "table": [0.5, 1, 1.5]}
    total = {"shared": [6, 12], "own": [3], "unused": None, "table": [1, 2, 3]}
    assert result.values("average") == [average] * 2
    assert result.values("sum") == [total] * 2
    assert result.values("sum and local") == [total | {"own": [0.5]}, total | {"own": [1]}]
    halves = [{"own": [0.5], "table": [0.5, 0, 0.5]}, {"own": [1], "table": [0, 1, 1]}]
    assert result.values("local") == [average | one for one in halves]
    assert result.values("not scaled") == [average | {"own": [1]}, average | {"own": [2]}]
    assert result.values("partial") == [[[0.5, 0.5], [1.5, 1.5]], [[1, 1], [1.5, 1.5]]]
    for texts in result.values("rejected"):
        assert len(texts) == 3, texts
        assert "hvd.Average or hvd.Sum" in texts[0]
        assert "gradient_predivide_factor" in texts[1]
        assert "local_layers has 1" in texts[2]
