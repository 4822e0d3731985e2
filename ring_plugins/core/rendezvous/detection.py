"""Which launcher started this process, and how to meet the other ranks under it.

Every launcher leaves variables in the environment. Several may have left theirs, since launchers start each other:
mpirun inside a SLURM allocation, torchrun agents started by mpirun. The innermost one counts, so the detectors run
in that order, and each returns None if another launcher's variables show that it is not the innermost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.rendezvous import mpi, slurm, spawn, tcp
from ring_plugins.core.rendezvous.record import LaunchRecord, Rendezvous

_DETECTORS: dict[str, Callable[[], LaunchRecord | None]] = {
    "spawned": spawn.detect,
    "mpi": mpi.detect,
    "rendezvous": tcp.detect,
    "slurm": slurm.detect,
    "single": lambda: LaunchRecord("single", "nothing", 0, 1, 0, 1),
}


def detect() -> LaunchRecord:
    """Read the environment; makes no connection and does not start MPI.

    RING_LAUNCHER (mpi, rendezvous, slurm, single) overrides the result.

    Raises:
        ArgumentError: RING_LAUNCHER has an unknown value.
        LaunchError: the environment contradicts itself.
    """
    forced = config.LAUNCHER.get()
    if forced:
        record = _DETECTORS[forced]()
        if record is None:
            raise LaunchError(f"RING_LAUNCHER={forced}, but the variables that {forced} sets are missing.")
        return record
    return next(record for detector in _DETECTORS.values() if (record := detector()) is not None)


def connect(ranks: int | None, generation: int) -> Rendezvous:
    """Meet the other ranks of the job; a process that was started on its own spawns them if `ranks` asks for it.

    Args:
        ranks: how many the caller wants, or None for as many as were started.
        generation: how often this process has connected before.
    """
    record = detect()
    if record.kind == "spawned" or (record.kind == "single" and max(ranks or 1, spawn.spawned_size()) > 1):
        found = spawn.connect(record, ranks or spawn.spawned_size())
    elif record.kind == "mpi":
        found = mpi.connect(record)
    elif record.kind == "rendezvous":
        found = tcp.connect(record, generation)
    else:
        found = Rendezvous(0, 1, lambda payload: [payload], None)
    if ranks is not None and ranks != found.size and found.rank == 0:
        warnings.warn(
            f"init(ranks={ranks}) was requested, but {record.by} started {found.size} ranks: using those.",
            stacklevel=4,
        )
    return found
