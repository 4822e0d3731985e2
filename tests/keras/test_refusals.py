"""What one rank's optimizer refuses reaches the ranks that wait for it."""

import pytest

from tests.launch import run_ranks

SCRIPT = """
import os, sys, time
import ring_plugins as ring
ring.init(ranks=2)
import keras, numpy as np
import ring_plugins.keras as rk
from tests.worker import report
refuses = ring.rank() == 1

def optimizer(variables):
    made = rk.DistributedOptimizer(keras.optimizers.SGD(0.1))
    made.build(variables)
    return made

def construction():
    rk.DistributedOptimizer("adam" if refuses else keras.optimizers.SGD(0.1))
    optimizer([keras.Variable(np.ones(3, np.float32))]).apply([keras.ops.ones(3, "float32")])

def unknown_variable():
    known, other = keras.Variable(np.ones(3, np.float32)), keras.Variable(np.ones(3, np.float32))
    made = optimizer([known])
    made.apply([keras.ops.ones(3, "float32")], [known])
    made.apply([keras.ops.ones(3, "float32")], [other if refuses else known])

def shape():
    known = keras.Variable(np.ones(3, np.float32))
    optimizer([known]).apply([keras.ops.ones(4 if refuses else 3, "float32")], [known])

def dtype():
    known = keras.Variable(np.ones(3, np.float32))
    optimizer([known]).apply([keras.ops.ones(3, "float16" if refuses else "float32")], [known])

def broadcast_root():
    rk.broadcast_variables(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), 7 if refuses else 0)

try:
    globals()[sys.argv[1]]()
    outcome = None
except Exception as error:
    outcome = [type(error).__name__, str(error)]
report("outcome", outcome)
if refuses:
    time.sleep(60)  # alive until rank 0 has raised, and ended the job
else:
    os._exit(0)
"""

CASES = {
    "broadcast_root": "refused the arguments of broadcast_variables: ",
    "construction": "refused the arguments of the construction of a DistributedOptimizer: optimizer=str",
    "unknown_variable": "refused the arguments of averaging gradients: variable ",
    "dtype": "refused the arguments of averaging gradients: the gradient of ",
    "shape": "could not take part in ",
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("dtype", "shape"))) for name in CASES]
)
@pytest.mark.parametrize(
    "backend", ["jax", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensorflow", "torch"))]
)
def test_what_one_rank_refuses_reaches_the_other(backend: str, case: str) -> None:
    result = run_ranks(SCRIPT, 2, args=[case], env={"KERAS_BACKEND": backend}, timeout=120, check=False)
    waited, refused = result.values("outcome")
    assert refused is not None and refused[0] not in ("PeerRefused", "PeerFailed"), refused
    assert waited is not None and "PeerRefused" in waited[0] + waited[1], (waited, refused)
    assert f"rank 1 {CASES[case]}" in waited[1], (waited, refused)


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
def test_a_loop_of_the_scripts_own_refuses_learning_rates_that_differ(backend):
    result = run_ranks(RATES, 2, env={"KERAS_BACKEND": backend}, timeout=120)
    for found in result.values("found"):
        assert "MismatchError: the optimizer's learning_rate differs among ranks (rank 0: 0.1" in found
    assert len(result.values("found")) == 2
