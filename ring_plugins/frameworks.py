"""What the core needs of frameworks, which it may not name: threads of PyTorch, TensorFlow and JAX, and others.

Nothing here imports a framework: one that is not loaded yet reads its variable when it starts.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from ring_plugins.core.linux.thread_count import OPENMP_VARIABLE, Applied, Library, is_default, register_library
from ring_plugins.core.rendezvous.spawn import further_arguments
from ring_plugins.core.rendezvous.tcp import register_store_loader


def register() -> None:
    """Have `init` give PyTorch, TensorFlow and JAX each rank's share of the cores, and use torch's store and Hydra."""
    register_library(Library("PyTorch", (OPENMP_VARIABLE, "MKL_NUM_THREADS"), _set_torch))
    register_library(Library("TensorFlow", ("TF_NUM_INTRAOP_THREADS",), _set_tensorflow))
    register_library(Library("JAX", ("PJRT_NPROC", "NPROC"), _set_jax))
    # Under torchrun, whose agent may hold MASTER_PORT, ranks meet through torch's store, also in scripts without torch.
    register_store_loader(lambda: importlib.import_module("ring_plugins.torch.rendezvous"))
    further_arguments.append(_hydra_overrides)


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


def _hydra_overrides(rank: int) -> list[str]:
    """Arguments by which a rank that a script starts under `hydra.main` uses the script's output directory.

    Hydra names the directory by the time of its start, and the others start later. The copy of the configuration and
    the log's file are left to rank 0.
    """
    hydra: Any = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return []
    found = hydra.HydraConfig.get()
    name = "sweep" if str(found.mode).endswith("MULTIRUN") else "run"
    directory = os.path.join(found.runtime.cwd, found[name].dir)
    quoted = directory.replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.{name}.dir='{quoted}'", "hydra.output_subdir=null", f"hydra.job.name={found.job.name}_rank_{rank}"]
