"""Horovod's environment variables: `hvd.init()` obeys those with a counterpart here, and rank 0 names the others once.

Scripts also read the place of their process from HOROVOD_RANK, HOROVOD_SIZE and the like, which `horovodrun` sets with
its Gloo controller. Here `hvd.init()` sets them, since other launchers do not know them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

import ring_plugins as ring
from ring_plugins.core.base import config
from ring_plugins.core.base.log import logger
from ring_plugins.core.world import current

#: Variables with a counterpart.
OBEYED: dict[str, config.Variable[Any]] = {
    "HOROVOD_AUTOTUNE": config.AUTOTUNE,
    "HOROVOD_GLOO_IFACE": config.INTERFACE,
    "HOROVOD_STALL_CHECK_TIME_SECONDS": config.STALL_WARNING,
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": config.STALL_ABORT,
    "HOROVOD_START_TIMEOUT": config.START_TIMEOUT,
}
_NO_CYCLES = "there are no cycles and no coordinator here"
_BUCKETS = "use bucket_bytes= of the optimizer, or RING_AUTOTUNE=1"
_DATA_PATH = "the way of the data is chosen for each network (docs/networks.md)"
_ONE_TRIAL = "RING_AUTOTUNE=1 needs no settings"
_OWN_LAUNCHER = "the launcher decides that (docs/from_horovod.md)"
#: What to do instead of setting the others; a name that ends in "_" stands for all that begin so.
INSTEAD = {
    "HOROVOD_ADASUM_": "there is no Adasum here",
    "HOROVOD_AUTOTUNE_": _ONE_TRIAL,
    "HOROVOD_BATCH_D2D_MEMCOPIES": _BUCKETS,
    "HOROVOD_CACHE_CAPACITY": _NO_CYCLES,
    "HOROVOD_CCL_": "use RING_INTERFACE and RING_TRANSPORT: oneCCL is not used",
    "HOROVOD_CONTROLLER": _OWN_LAUNCHER,
    "HOROVOD_CPU_OPERATIONS": "use RING_TRANSPORT",
    "HOROVOD_CYCLE_TIME": _NO_CYCLES,
    "HOROVOD_DISABLE_GROUP_FUSION": _BUCKETS,
    "HOROVOD_DISABLE_NVTX_RANGES": "use RING_TIMELINE=directory",
    "HOROVOD_ELASTIC_": "the other ranks do not wait for a new process (docs/fault_tolerance.md)",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "it is always so",
    "HOROVOD_ENABLE_XLA_OPS": "do not compile with jit_compile=True",
    "HOROVOD_FUSION_THRESHOLD": _BUCKETS,
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "use RING_NETWORK_TIMEOUT and RING_TIMEOUT",
    "HOROVOD_HIERARCHICAL_": _DATA_PATH,
    "HOROVOD_LOG_HIDE_TIME": "use logging.getLogger('ring_plugins')",
    "HOROVOD_LOG_TIMESTAMP": "use logging.getLogger('ring_plugins')",
    "HOROVOD_MPI_THREADS_DISABLE": "no thread of a rank calls MPI beside it",
    "HOROVOD_NUM_NCCL_STREAMS": "use NCCL's own variables (docs/gpu.md)",
    "HOROVOD_SPARK_": "use the arguments of ring_plugins.horovod.spark.run",
    "HOROVOD_THREAD_AFFINITY": "use `ring run --bind core`",
    "HOROVOD_TIMELINE": "use RING_TIMELINE=directory, into which rank 0 writes the timeline",
    "HOROVOD_TIMELINE_MARK_CYCLES": _NO_CYCLES,
    "HOROVOD_TORUS_ALLREDUCE": _DATA_PATH,
}
_PLACE = (
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)  # fmt: skip
#: Those that tell of Horovod's build or of its launcher's inside, and so mean nothing to a script.
_SILENT = (
    "HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_CUDA_", "HOROVOD_NCCL_", "HOROVOD_ROCM_", "HOROVOD_BUILD_", "HOROVOD_MPI",
    "HOROVOD_GLOO", "HOROVOD_CCL", "HOROVOD_ALLOW_MIXED_GPU_IMPL", "HOROVOD_CMAKE", "HOROVOD_DEBUG",
    "HOROVOD_LOCAL_VERSION", "HOROVOD_MIXED_INSTALL", "HOROVOD_NVTX_", "HOROVOD_SKIP_COMPILE", "HOROVOD_SECRET_KEY",
    "HOROVOD_HOSTNAME", "HOROVOD_ELASTIC",
    "HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_LOG_LEVEL", "HOROVOD_STALL_CHECK_DISABLE", *_PLACE,
)  # fmt: skip
_LEVELS = {"trace": logging.DEBUG, "fatal": logging.CRITICAL}
_LEVELS |= {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}


def obey(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set the RING_* variables that Horovod's stand for, unless they are set; call it before the job starts.

    Returns:
        A line for each that is set and has no effect.
    """
    notes = []
    for name in sorted(one for one in environment if one.startswith("HOROVOD_")):
        text = environment[name]
        if name == "HOROVOD_LOG_LEVEL" and text.lower() in _LEVELS:
            logger.setLevel(_LEVELS[text.lower()])
        elif name == "HOROVOD_STALL_CHECK_DISABLE" and text not in ("", "0"):
            environment.setdefault(config.STALL_WARNING.name, "1e9")
        elif (ours := OBEYED.get(name)) is not None:
            if text and not ours.is_set(environment) and not ours.problem({ours.name: text}):
                environment[ours.name] = text
            elif ours.problem({ours.name: text}) and text != "0":  # 0 seconds stand for never
                notes.append(f"{name}={text} is {ours.problem({ours.name: text})}; here it stands for {ours.name}.")
        elif text and (why := _why_without_effect(name)):
            notes.append(f"{name} has no effect here: {why}.")
    return notes


def _why_without_effect(name: str) -> str:
    """Why a variable has no effect, and what to do instead; "" if nobody asks."""
    if name in INSTEAD:
        return INSTEAD[name]
    found = [text for beginning, text in INSTEAD.items() if beginning.endswith("_") and name.startswith(beginning)]
    if found or name.startswith(_SILENT):
        return "".join(found)
    return "Horovod 0.28 does not know it either"


def tell_place(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set HOROVOD_RANK, HOROVOD_SIZE and the like to this rank's place in the job as it is now."""
    place = current().topology
    values = (place.rank, place.size, place.local_rank, place.local_size, ring.node_rank(), ring.num_nodes())
    environment.update({name: str(value) for name, value in zip(_PLACE, values, strict=True)})


def init() -> None:
    """`ring_plugins.init()` with Horovod's variables."""
    notes = [] if ring.is_initialized() else obey()
    ring.init()
    tell_place()
    if ring.rank() == 0:
        for note in notes:
            logger.warning("%s", note)
