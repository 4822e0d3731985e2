"""What one rank's optimizer rejects reaches the ranks that wait for it."""

import pytest

from tests.launch import run_ranks

SCRIPT = """
import os, sys, time
import ring_plugins as ring
ring.init(ranks=2)
import keras, numpy as np
import ring_plugins.keras as rk
from tests.worker import report
rejects = ring.rank() == 1

def optimizer(variables):
    made = rk.DistributedOptimizer(keras.optimizers.SGD(0.1))
    made.build(variables)
    return made

def construction():
    rk.DistributedOptimizer("adam" if rejects else keras.optimizers.SGD(0.1))
    optimizer([keras.Variable(np.ones(3, np.float32))]).apply([keras.ops.ones(3, "float32")])

def unknown_variable():
    known, other = keras.Variable(np.ones(3, np.float32)), keras.Variable(np.ones(3, np.float32))
    made = optimizer([known])
    made.apply([keras.ops.ones(3, "float32")], [known])
    made.apply([keras.ops.ones(3, "float32")], [other if rejects else known])

def shape():
    known = keras.Variable(np.ones(3, np.float32))
    optimizer([known]).apply([keras.ops.ones(4 if rejects else 3, "float32")], [known])

def dtype():
    known = keras.Variable(np.ones(3, np.float32))
    optimizer([known]).apply([keras.ops.ones(3, "float16" if rejects else "float32")], [known])

def broadcast_root():
    rk.broadcast_variables(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), 7 if rejects else 0)

for case in sys.argv[1:]:
    try:
        globals()[case]()
        outcome = None
    except Exception as error:
        outcome = [type(error).__name__, str(error)]
    report(case, outcome)
if rejects:
    time.sleep(60)  # alive until rank 0 has raised, and ended the job
else:
    os._exit(0)
"""

CASES = {
    "broadcast_root": "rejected the arguments of broadcast_variables: ",
    "unknown_variable": "rejected the arguments of averaging gradients: variable ",
    "dtype": "rejected the arguments of averaging gradients: the gradient of ",
    "shape": "could not take part in ",
    # In a launch of its own, or last: it breaks the communicator of the job.
    "construction": "rejected the arguments of the construction of a DistributedOptimizer: optimizer=str",
}


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["broadcast_root"], id="broadcast", marks=pytest.mark.slow),
        pytest.param(["unknown_variable", "dtype", "shape", "construction"], id="averaging"),
    ],
)
@pytest.mark.parametrize(
    "backend", ["jax", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensorflow", "torch"))]
)
def test_what_one_rank_rejects_reaches_the_other(backend: str, cases: list[str]) -> None:
    result = run_ranks(SCRIPT, 2, args=cases, env={"KERAS_BACKEND": backend}, timeout=120, check=False)
    for case in cases:
        words = CASES[case]
        waited, rejected = result.values(case)
        assert rejected is not None and rejected[0] not in ("PeerRejected", "PeerFailed"), rejected
        assert waited is not None and "PeerRejected" in waited[0] + waited[1], (waited, rejected)
        assert f"rank 1 {words}" in waited[1], (waited, rejected)


RATES = """
import ring_plugins as ring
ring.init(ranks=2)
import keras, numpy as np
import ring_plugins.keras as rk
from tests.worker import report

weight = keras.Variable(np.ones(3, np.float32))
optimizer = rk.DistributedOptimizer(keras.optimizers.SGD(0.1 * (1 + ring.rank())))
optimizer.build([weight])
step = lambda: optimizer.apply([keras.ops.ones(3, "float32")], [weight])
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    step = tf.function(step)
try:
    step()
except Exception as error:  # TensorFlow wraps those that are raised while it traces
    report("found", f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_a_loop_of_the_scripts_own_rejects_learning_rates_that_differ(backend):
    result = run_ranks(RATES, 2, env={"KERAS_BACKEND": backend}, timeout=120)
    for found in result.values("found"):
        assert "MismatchError: the optimizer's learning_rate differs among ranks (rank 0: 0.1" in found
    assert len(result.values("found")) == 2
