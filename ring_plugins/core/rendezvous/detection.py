"""Which launcher started this process."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.rendezvous import mpi as mpirun
from ring_plugins.core.rendezvous import slurm
from ring_plugins.core.rendezvous import spawn as grow
from ring_plugins.core.rendezvous import tcp as rendezvous
from ring_plugins.core.rendezvous.record import Connection, LaunchRecord

_DETECTORS: dict[str, Callable[[], LaunchRecord | None]] = {
    "grown": grow.detect,
    "mpi": mpirun.detect,
    "rendezvous": rendezvous.detect,
    "slurm": slurm.detect,
    "alone": lambda: LaunchRecord("alone", "nothing", 0, 1, 0, 1),
}


def detect() -> LaunchRecord:
    """Read the environment: no connection is made and MPI is not started.

    RING_LAUNCHER (mpi, rendezvous, slurm, alone) overrules what is found.

    Raises:
        LaunchError: the environment contradicts itself.
    """
    forced = config.LAUNCHER.get()
    if forced:
        if forced not in _DETECTORS:
            raise LaunchError(f"RING_LAUNCHER={forced!r} is not one of {', '.join(_DETECTORS)}.")
        record = _DETECTORS[forced]()
        if record is None:
            raise LaunchError(f"RING_LAUNCHER={forced}, but none of the variables that {forced} sets are there.")
        return record
    return next(record for detector in _DETECTORS.values() if (record := detector()) is not None)


def connect(ranks: int | None, generation: int) -> Connection:
    """Meet the other ranks of the job, growing to `ranks` if this process was started alone.

    Args:
        ranks: how many the caller wants, or None for as many as were started.
        generation: how often this process has connected before.
    """
    record = detect()
    if record.kind == "grown" or (record.kind == "alone" and max(ranks or 1, grow.spawned_size()) > 1):
        connection = grow.connect(record, ranks or grow.spawned_size())
    elif record.kind == "mpi":
        connection = mpirun.connect(record)
    elif record.kind == "rendezvous":
        connection = rendezvous.connect(record, generation)
    else:
        connection = Connection(0, 1, lambda payload: [payload], None)
    if ranks is not None and ranks != connection.size and connection.rank == 0:
        warnings.warn(
            f"init(ranks={ranks}) was asked for, but {record.by} started {connection.size}: following the launcher.",
            stacklevel=4,
        )
    return connection
