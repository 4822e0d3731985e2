"""The launches that tests share: starting a framework takes longer than most of what is looked at."""

import functools

from tests.launch import LaunchFailed, Result, run_ranks

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_NUM_INTRAOP_THREADS": "1", "JAX_PLATFORMS": "cpu"}

# Ranks that are there before Keras is imported import it at the same time.
START = """
import os
import ring_plugins as ring

ring.init(ranks=int(os.environ["TEST_RANKS"]))
"""


def environment(backend: str, **more: str) -> dict[str, str]:
    return {"KERAS_BACKEND": backend, **QUIET, **more}


def launch(backend: str, ranks: int = 2, only: str = "") -> Result:
    """All scenarios and behaviours of a backend, or those that `only` names, in one launch."""
    found = _launch(backend, ranks, only)
    if isinstance(found, LaunchFailed):
        raise found
    return found


@functools.cache
def _launch(backend: str, ranks: int, only: str) -> Result | LaunchFailed:
    """Once, also where it fails: every test that wanted it fails then, without trying again."""
    script = START + "from tests.keras.worker import main\nmain()\n"
    # Dozens of small models are compiled to run a few steps: without optimising, XLA does it in two thirds of the time.
    quick = environment(backend, TEST_ONLY=only, XLA_FLAGS="--xla_backend_optimization_level=0")
    try:
        return run_ranks(script, ranks, env=quick, timeout=850)
    except LaunchFailed as failure:
        return failure
