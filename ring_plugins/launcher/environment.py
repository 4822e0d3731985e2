"""The environment of the ranks: which variables travel to other hosts, and how many threads a rank gets."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError

#: Variables that training and its libraries read. All others may differ between hosts.
_PREFIXES = (
    "RING_", "NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "PYTHON",
    "CUDA_", "NVIDIA_", "TORCH_", "PYTORCH_", "KERAS_", "TF_", "XLA_", "JAX_", "PL_", "HF_", "WANDB_", "MLFLOW_",
)  # fmt: skip
_NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
#: Describes one process to itself; another rank that inherited it would take that process's place.
_NEVER = (config.SPAWNED.name,)
#: What a job does when ranks are lost; and what our launchers tell each rank.
_POLICY = (config.ON_FAILURE.name, config.MIN_RANKS.name, config.MAX_RANKS.name, *config.STANDBYS.names)
_PLACE = (config.SPAWNED.name, config.LOSSES_TOLERATED.name, config.JOINS.name, config.SLOT.name)


def exported_variables(
    wanted: Sequence[str], threads: int, interface: str | None, environment: Mapping[str, str] = os.environ
) -> dict[str, str | None]:
    """The variables that every rank gets: name to value, or to None for the value that this process has.

    Values that are None need not appear on a command line, where every user of the host could read them.

    Args:
        wanted: the user's additions, as `NAME` or `NAME=VALUE`.
        threads: OMP_NUM_THREADS, unless the user has set it.
        interface: network interface for NCCL and gloo, unless the user has set theirs.
        environment: of this process.

    Raises:
        ArgumentError: a wanted variable is not set here.
    """
    chosen: dict[str, str | None] = {
        name: None
        for name in sorted(environment)
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _NEVER
    }
    if "OMP_NUM_THREADS" not in environment:
        chosen["OMP_NUM_THREADS"] = str(threads)
    if interface:
        chosen[config.INTERFACE.name] = interface
        is_subnet = "/" in interface  # which NCCL and gloo do not understand
        # "=": NCCL would else take every interface whose name begins so, such as eth10 for eth1.
        theirs = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
        if not is_subnet:
            chosen |= {name: value for name, value in theirs.items() if name not in environment}
    for text in wanted:
        name, equals, value = text.partition("=")
        if not equals and name not in environment:
            raise ArgumentError(f"-x {name}: {name} is not set here; set it, or write -x {name}=VALUE.")
        chosen[name] = value if equals else None
    return chosen


def forget_outer_job(environment: MutableMapping[str, str] = os.environ) -> str:
    """In a rank of a job, remove what tells of that job, as another one is to be started here.

    If the job goes on after losses, the rank has the options of its `ring run` as variables. They would be taken for
    options of the new job.

    Args:
        environment: of this process.

    Returns:
        These options, as text; "" if there are none.
    """
    recovers = config.LOSSES_TOLERATED.is_set(environment)
    for name in (*_PLACE, *([config.LAUNCHER.name] if config.SLOT.is_set(environment) else [])):
        environment.pop(name, None)
    if not recovers:
        return ""
    found = {name: environment.pop(name) for name in _POLICY if name in environment}
    return " ".join(f"{name}={value}" for name, value in found.items())


def threads_per_rank(cores: int, ranks: int) -> int:
    """Threads for each of `ranks` that share `cores`."""
    return max(1, cores // ranks)
