"""Which launcher started this process, and how to meet the other ranks under it.

Every launcher leaves variables in the environment. Several may have left theirs, since launchers start each other:
mpirun inside a SLURM allocation, torchrun agents started by mpirun. The innermost one counts, so the detectors run
in that order, and each returns None if another launcher's variables show that it is not the innermost.

A process that finds itself alone although its environment speaks of other ranks is rejected: each such process would
train a model of its own, and all would seem to succeed. So is a child of a rank, whose inherited variables claim that
it is the rank itself.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from dataclasses import replace

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.rendezvous import exported, mpi, slurm, spawn, tcp
from ring_plugins.core.rendezvous.record import LaunchRecord, Rendezvous, integer
from ring_plugins.core.rendezvous.slots import own_slot

_DETECTORS: dict[str, Callable[[], LaunchRecord | None]] = {
    "spawned": spawn.detect,
    "mpi": mpi.detect,
    "rendezvous": tcp.detect,
    "slurm": slurm.detect,
    "single": lambda: LaunchRecord("single", "nothing", 0, 1, 0, 1),
}
#: The variables that tell a rank from all others, of MPI and of all launchers.
_MPI = mpi.IDENTITY
_LAUNCHERS = (*tcp.VARIABLES, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", *_MPI, *slurm.IDENTITY)


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
            missing = _missing(tcp.VARIABLES) if forced == "rendezvous" else []
            named = f": {', '.join(missing)}" if missing else ""
            raise LaunchError(f"RING_LAUNCHER={forced}, but the variables that {forced} sets are missing{named}.")
        return record
    record = next(record for detector in _DETECTORS.values() if (record := detector()) is not None)
    if record.kind == "mpi" and _is_inherited(_MPI) and not _is_inherited(_LAUNCHERS):
        # a child of an MPI rank, which cannot join MPI in its place, but was given a rank of another job
        return tcp.detect() or record
    return record


def connect(ranks: int | None, generation: int) -> Rendezvous:
    """Meet the other ranks of the job; a process that was started on its own spawns them if `ranks` asks for it.

    Args:
        ranks: how many the caller wants, or None for as many as were started.
        generation: how often this process has connected before.
    """
    record = detect()
    if record.kind != "rendezvous" or record.variables:
        exported.withdraw()  # by a rank from which this process descends
    if not config.LAUNCHER.is_set():
        _check_that_nobody_is_missing(record, ranks)
    _check_that_this_is_the_rank(record)
    slot = own_slot()
    if slot is not None and not config.JOINS.is_set():
        slot.start()
    if record.kind == "spawned" or (record.kind == "single" and max(ranks or 1, spawn.spawned_size()) > 1):
        found = spawn.connect(record, ranks or spawn.spawned_size())
    elif record.kind == "mpi":
        found = mpi.connect(record)
    elif slot is not None and config.JOINS.is_set():
        found = tcp.wait_outside(record, slot.read_join_info(), config.JOINS.get())
    elif record.kind == "rendezvous":
        found = tcp.connect(record, generation)
    else:
        found = Rendezvous(0, 1, lambda payload: [payload], None)
    if slot is not None:
        found = replace(found, slot=slot)
    if ranks is not None and ranks != found.size and found.rank == 0 and not config.JOINS.is_set():
        by, remedy = record.by, "The launcher's own option decides."
        if record.kind == "single":
            by, remedy = "this script's first init()", "They stay for the whole script, so pass the number there."
        warnings.warn(
            f"init(ranks={ranks}) was requested, but {by} started {found.size} "
            f"{'rank: using that' if found.size == 1 else 'ranks: using those'}. {remedy}",
            stacklevel=3,
        )
    if found.size > 1:
        os.environ[config.MEMBER.name] = f"{os.getpid()} {found.rank} {_identity(_LAUNCHERS)} {_identity(_MPI)}"
    return found


def leave(kind: str) -> None:
    """Let a child of this process join in its place; called when this rank has left the job.

    Args:
        kind: of launcher. MPI does not let a process join again, and would wait for ever.
    """
    if kind != "mpi":
        os.environ.pop(config.MEMBER.name, None)


def _check_that_nobody_is_missing(record: LaunchRecord, ranks: int | None) -> None:
    """Reject a process that no launcher seems to have started, but whose environment speaks of others.

    Raises:
        LaunchError: the text says what is missing.
    """
    if record.kind != "single":
        return
    alone = "; RING_LAUNCHER=single makes it a job of its own"
    present = [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)]
    is_one_of_several = (integer("WORLD_SIZE") or 1) > 1 or (integer("RANK") or 0) > 0
    if is_one_of_several or (present and integer("WORLD_SIZE") is None):
        missing = _missing(tcp.VARIABLES)
        raise LaunchError(
            f"{' and '.join(present)} {'are' if len(present) > 1 else 'is'} set, but {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not, so this process cannot find the other ranks. Set "
            f"{', '.join(tcp.VARIABLES)} on every rank (MASTER_ADDR is the host of rank 0, MASTER_PORT a free port "
            "there, both equal on all ranks), or start with torchrun, `ring run` or mpirun. If it was not meant to be "
            f"one of several, unset {' and '.join(text.partition('=')[0] for text in present)}{alone}."
        )
    tasks = integer("SLURM_NTASKS") or 1
    if ranks is None and tasks > 1 and os.environ.get("SLURM_JOB_ID") and (integer("SLURM_STEP_NUM_TASKS") or 1) == 1:
        raise LaunchError(
            f"SLURM allocated {tasks} tasks (SLURM_NTASKS), but this process is none of them, since srun did not start "
            "it: it would be a job of one rank. Start it with `srun python ...`, with `ring run` or with mpirun; "
            f"init(ranks=...) starts ranks on this host alone{alone}."
        )


def _missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not os.environ.get(name)]


def _check_that_this_is_the_rank(record: LaunchRecord) -> None:
    """Reject a child of a rank: the launcher's variables that it inherited are those of its parent.

    Raises:
        LaunchError: a process with these variables has joined a job, and this process descends from it.
    """
    if record.kind in ("mpi", "rendezvous") and _is_inherited(_MPI if record.kind == "mpi" else _LAUNCHERS):
        pid, rank, *_ = config.MEMBER.get().split()
        raise LaunchError(
            f"this process inherited the variables of {record.by} from rank {rank} (process {pid}), but is not that "
            "rank: it is a child of it (a data loader's worker, or a script that the rank started). Call "
            "ring_plugins.init() in the ranks themselves, and put what a script does after `if __name__ == "
            '"__main__":`. A child that is to be a job of its own needs RING_LAUNCHER=single.'
        )


def _is_inherited(names: tuple[str, ...]) -> bool:
    """Whether a process from which this one descends has joined a job with the same values of these variables."""
    pid, *_, everything, of_mpi = config.MEMBER.get().split() or ("", "", "")
    return pid not in ("", str(os.getpid())) and _identity(names) == (of_mpi if names is _MPI else everything)


def _identity(names: tuple[str, ...]) -> str:
    """Of the place that a launcher gave to this process: another launch, or another rank, has another one."""
    text = "\n".join(f"{name}={os.environ.get(name, '')}" for name in names)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
