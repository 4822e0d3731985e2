"""The launches that tests share: starting TensorFlow takes longer than most of what is looked at."""

import functools
from pathlib import Path

from tests.launch import Result, run_ranks

HERE = Path(__file__).parent
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_NUM_INTRAOP_THREADS": "1", "JAX_PLATFORMS": "cpu"}


def environment(backend: str, **more: str) -> dict[str, str]:
    return {"KERAS_BACKEND": backend, **QUIET, **more}


@functools.cache
def launch(worker: str, backend: str, ranks: int = 2, only: str = "") -> Result:
    """Everything that a worker looks at, or what `only` names, in one launch."""
    return run_ranks(HERE / worker, ranks, env=environment(backend, TEST_ONLY=only), timeout=240)
