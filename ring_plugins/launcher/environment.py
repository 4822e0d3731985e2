"""Which environment variables the ranks get, also those on other hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ring_plugins.core.base.errors import ArgumentError

#: What these packages read. Everything else of a login belongs to its own host.
_PREFIXES = (
    "RING_", "NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "PYTHON",
    "CUDA_", "NVIDIA_", "TORCH_", "PYTORCH_", "KERAS_", "TF_", "XLA_", "JAX_", "PL_", "HF_", "WANDB_", "MLFLOW_",
)  # fmt: skip
_NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
#: Set by a launcher for one process; handed on they would contradict the next launcher.
_NEVER = ("RING_SPAWNED",)


def exported(
    wanted: Sequence[str], threads: int, interface: str | None, environment: Mapping[str, str] = os.environ
) -> dict[str, str | None]:
    """The variables that every rank gets: name to value, or to None for the value that this process has.

    Args:
        wanted: what the user adds, as `NAME` or `NAME=VALUE`.
        threads: OMP_NUM_THREADS where the user has not set it.
        interface: what NCCL and gloo are told to use where the user has not told them.
        environment: of this process.

    Raises:
        ArgumentError: a wanted variable that is not set here.
    """
    chosen: dict[str, str | None] = {
        name: None
        for name in sorted(environment)
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _NEVER
    }
    if "OMP_NUM_THREADS" not in environment:
        chosen["OMP_NUM_THREADS"] = str(threads)
    if interface:
        chosen["RING_INTERFACE"] = interface
        names_only = "/" not in interface  # a subnet is more than NCCL and gloo understand
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if names_only and name not in environment:
                chosen[name] = interface
    for text in wanted:
        name, equals, value = text.partition("=")
        if not equals and name not in environment:
            raise ArgumentError(f"-x {name}: it is not set here; set it, or write -x {name}=VALUE.")
        chosen[name] = value if equals else None
    return chosen


def threads_per_rank(cores: int, ranks: int) -> int:
    """Threads that a rank may use where `ranks` share `cores`."""
    return max(1, cores // ranks)
