"""Sets the number of threads in PyTorch, TensorFlow and JAX, for core/linux/thread_count.py, which names none of them.

Nothing here imports a framework: one that is not loaded yet reads its variable when it starts.
"""

from __future__ import annotations

import sys
from typing import Any

from ring_plugins.core.linux.thread_count import OPENMP_VARIABLE, Applied, Library, is_default, register_library


def register() -> None:
    """Have `init` give PyTorch, TensorFlow and JAX each rank's share of the cores."""
    register_library(Library("PyTorch", (OPENMP_VARIABLE, "MKL_NUM_THREADS"), _set_torch))
    register_library(Library("TensorFlow", ("TF_NUM_INTRAOP_THREADS",), _set_tensorflow))
    register_library(Library("JAX", ("PJRT_NPROC", "NPROC"), _set_jax))


def _set_torch(threads: int) -> Applied:
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "set_num_threads"):
        return Applied.NOT_LOADED
    if not is_default(torch.get_num_threads()):
        return Applied.KEPT
    torch.set_num_threads(threads)
    return Applied.DONE


def _set_tensorflow(threads: int) -> Applied:
    tensorflow: Any = sys.modules.get("tensorflow")
    if not hasattr(tensorflow, "config"):
        return Applied.NOT_LOADED
    threading = tensorflow.config.threading
    if threading.get_intra_op_parallelism_threads():
        return Applied.KEPT
    try:
        threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError:  # after the first operation
        return Applied.TOO_LATE
    return Applied.DONE


def _set_jax(threads: int) -> Applied:
    """JAX has no function for this, only the variable, which its client for CPUs reads when it starts."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    if bridge is None:
        return Applied.NOT_LOADED
    # The module is private; `backends_are_initialized` is there from 0.4.1 to 0.8 at least.
    if not getattr(bridge, "backends_are_initialized", lambda: False)():
        return Applied.DONE
    jax = sys.modules["jax"]
    return Applied.TOO_LATE if jax.default_backend() == "cpu" else Applied.NOT_LOADED
