"""Started by torchrun, or by anything that sets its variables: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""

from __future__ import annotations

import importlib
import os
import sys

from ring_plugins.core.errors import MissingDependency
from ring_plugins.core.launch.record import Connection, LaunchRecord, integer

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def detect() -> LaunchRecord | None:
    """The variables that torchrun sets."""
    if not all(os.environ.get(name) for name in _NEEDED):
        return None
    by = "torchrun" if os.environ.get("TORCHELASTIC_RUN_ID") else "the variables RANK and MASTER_ADDR"
    return LaunchRecord(
        "rendezvous", by, integer("RANK"), integer("WORLD_SIZE"), integer("LOCAL_RANK"), integer("LOCAL_WORLD_SIZE")
    )


def connect(record: LaunchRecord, generation: int) -> Connection:
    """Meet through torch.distributed's store, with gloo as the plane.

    The plane lives with the torch code and is found by name, because the core imports no framework.

    Raises:
        MissingDependency: torch is not installed.
    """
    os.environ.update(record.variables)
    try:
        gloo = importlib.import_module("ring_plugins.torch.gloo")
    except ImportError as error:
        raise MissingDependency(
            f"{record.by} starts processes that meet through torch, which is not installed ({error}): "
            'pip install torch, or start with mpirun after pip install "ring_plugins[mpi]".'
        ) from error
    plane = gloo.open_plane(generation)
    return Connection(plane.rank, plane.size, plane.all_gather_object, plane, plane.close)


def say_what_is_lost(nodes: int) -> None:
    """Tell the user, on rank 0, what gloo between hosts means."""
    if nodes > 1:
        print(
            "ring_plugins: started without MPI, so gloo carries data between the hosts: correct, but small messages "
            "take about ten times longer than with MPI. Inside a host nothing is lost. Starting with mpirun avoids it.",
            file=sys.stderr,
            flush=True,
        )
