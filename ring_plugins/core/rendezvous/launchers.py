"""All launchers that `init` knows: what is special about each stands here, and nowhere else.

Every launcher leaves variables in the environment. Several may have left theirs, since launchers start each other:
mpirun inside a SLURM allocation, torchrun agents started by mpirun. The innermost one counts, so they are tried in the
order of this table.

To add a launcher, add an entry. If its ranks do not meet by MPI and it sets no RANK and MASTER_ADDR, its `find` returns
these as `variables` of the record (see slurm.py), and its ranks meet by `tcp.connect`.

A process that finds itself alone although its environment speaks of other ranks is rejected: each such process would
train a model of its own, and all would seem to succeed. So is a child of a rank, whose inherited variables claim that
it is the rank itself.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.rendezvous import mpi, record, slurm, spawn, tcp
from ring_plugins.core.rendezvous.record import Launcher, LaunchRecord, Loss, Rendezvous, integer, read
from ring_plugins.core.rendezvous.slots import State, own_slot

_Find = Callable[[Launcher], LaunchRecord | None]


def reads(rank: str, size: str, local_rank: str, local_size: str = "") -> _Find:
    """Finds a launcher by its variables for rank, number of ranks, and the same on this host."""
    return lambda launcher: None if integer(rank) is None else read(launcher, rank, size, local_rank, local_size)


def _torchruns_variables(name: Callable[[], str]) -> _Find:
    """Finds a launcher by torchrun's variables, if it is the one that has set them: then `name` returns its name."""

    return lambda launcher: tcp.find(replace(launcher, name=found)) if (found := name()) else None


def _find_by_hand(launcher: Launcher) -> LaunchRecord | None:
    # Where RING_LAUNCHER chooses these variables, another launcher has left its own, and may end all.
    return tcp.find(replace(launcher, at_loss=Loss.ENDS_ALL) if config.LAUNCHER.is_set() else launcher)


def _find_task(launcher: Launcher) -> LaunchRecord | None:
    found = slurm.find(launcher)
    # The only task of its step is alone.
    return LaunchRecord(replace(NONE, name=launcher.name), 0, 1, 0, 1) if found and found.size == 1 else found


def _mpirun(name: str, find: _Find, identity: tuple[str, ...] = (), variables: tuple[str, ...] = ()) -> Launcher:
    return Launcher(
        "mpi",
        name,
        find,
        mpi.connect,
        identity=identity,
        variables=variables,
        kept=("OMPI_ALLOW_", "PRTE_ALLOW_"),
        at_loss=Loss.STARTS_ANEW,
        exchange=mpi.exchange,
        uses_mpi=True,
        is_parent=True,
    )


def _with_master(name: str, find: _Find, at_loss: Loss, is_parent: bool = False) -> Launcher:
    return Launcher("rendezvous", name, find, tcp.connect, at_loss=at_loss, uses_master=True, is_parent=is_parent)


_HYDRA = ("PMI_RANK", "PMI_FD", "PMI_PORT", "PMI_ID", "HYDI_CONTROL_FD")
#: Of a script that starts its own ranks, or of `ring run` on one host.
SPAWNED = Launcher(
    "spawned", "ring run", spawn.find, spawn.connect, (config.SPAWNED.name,), at_loss=Loss.AS_TOLD, is_parent=True
)
NONE = Launcher(
    "single", "nothing", lambda launcher: LaunchRecord(launcher, 0, 1, 0, 1), spawn.connect, at_loss=Loss.ALONE
)
LAUNCHERS: tuple[Launcher, ...] = (
    SPAWNED,
    Launcher(
        "rendezvous",
        "torchrun",
        _torchruns_variables(lambda: "torchrun" if os.environ.get("TORCHELASTIC_RUN_ID") else ""),
        tcp.connect,
        identity=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        variables=("TORCHELASTIC_", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
        at_loss=Loss.STARTS_ANEW,
        exchange=tcp.exchange,
        uses_master=True,
        counts_ranks_of_host=True,
        is_parent=True,
    ),
    _mpirun(
        "mpirun (Open MPI)",
        reads(*(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
        ("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"),
        ("OMPI_", "PMIX_", "PRTE_"),
    ),
    _mpirun(
        "mpirun (MVAPICH)",
        reads(*(f"MV2_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_",),
    ),
    _mpirun(
        "mpirun (MPICH or Intel MPI)",
        reads("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        _HYDRA,
        ("PMI_", "HYDI_", "HYDRA_", "I_MPI_", "MPIR_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ),
    _mpirun("mpirun (PMIx)", reads("PMIX_RANK", "SLURM_NTASKS", "SLURM_LOCALID"), ("PMIX_RANK",)),
    _mpirun("MPI", mpi.find_initialized),
    _with_master(
        "ring run", _torchruns_variables(lambda: "ring run" if config.SLOT.is_set() else ""), Loss.AS_TOLD, True
    ),
    _with_master("a function", _torchruns_variables(lambda: record.caller), Loss.AS_TOLD),
    Launcher(
        "rendezvous",
        "the variables RANK and MASTER_ADDR",
        _find_by_hand,
        tcp.connect,
        identity=tcp.VARIABLES,
        variables=(*tcp.VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        at_loss=Loss.NOTHING,
        uses_master=True,
        half_started=tcp.half_started,
    ),
    Launcher(
        "slurm",
        "srun",
        _find_task,
        tcp.connect,
        identity=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
        variables=("SLURM_",),
        kept=("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_ARRAY_", "SLURM_SUBMIT_", "SLURM_RESTART_COUNT"),
        at_loss=Loss.STARTS_ANEW,
        exchange=tcp.exchange,
        uses_master=True,
        counts_ranks_of_host=True,
        half_started=slurm.half_started,
    ),
    NONE,
)


def identity(of_mpi: bool = False) -> tuple[str, ...]:
    """The variables that tell a process from all others of all launchers, or of MPI's."""
    return tuple(name for one in LAUNCHERS if one.uses_mpi or not of_mpi for name in one.identity)


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables by which launchers tell their processes who they are."""
    names = (config.LAUNCHER.name, *(name for one in LAUNCHERS for name in one.variables))
    beginnings = tuple(name for name in names if name.endswith("_"))
    kept = tuple(name for one in LAUNCHERS for name in one.kept)
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(kept) or not (name.startswith(beginnings) or name in names)
    }


def detect() -> LaunchRecord:
    """Read the environment; makes no connection and does not start MPI.

    RING_LAUNCHER (mpi, rendezvous, slurm, single) overrides the result.

    Raises:
        ArgumentError: RING_LAUNCHER has an unknown value.
        LaunchError: the environment contradicts itself.
    """
    forced = config.LAUNCHER.get()
    record = _find(forced)
    if record is None:
        missing = [name for name in tcp.VARIABLES if not os.environ.get(name)] if forced == "rendezvous" else []
        named = f": {', '.join(missing)}" if missing else ""
        raise LaunchError(f"RING_LAUNCHER={forced}, but the variables that {forced} sets are missing{named}.")
    if not forced and record.launcher.uses_mpi and _is_inherited(of_mpi=True) and not _is_inherited():
        # a child of an MPI rank, which cannot join MPI in its place, but was given a rank of another job
        return _find("rendezvous") or record
    return record


def _find(kind: str) -> LaunchRecord | None:
    tried = (launcher for launcher in LAUNCHERS if kind in ("", launcher.kind))
    return next((record for launcher in tried if (record := launcher.find(launcher)) is not None), None)


def connect(ranks: int | None, generation: int) -> Rendezvous:
    """Meet the other ranks of the job; a process that was started on its own spawns them if `ranks` asks for it.

    Args:
        ranks: how many the caller wants, or None for as many as were started.
        generation: how often this process has connected before.
    """
    record = detect()
    launcher = record.launcher
    if not launcher.uses_master or record.variables:
        tcp.withdraw_exported()  # by a rank from which this process descends
    if launcher.is_none and not config.LAUNCHER.is_set():
        for one in LAUNCHERS:  # this process seems alone: does its environment speak of others?
            if problem := one.half_started(ranks):
                raise LaunchError(f"{problem}; RING_LAUNCHER=single makes it a job of its own.")
    _check_that_this_is_the_rank(record)
    slot = own_slot()
    if slot is not None and not config.JOINS.is_set():
        slot.note(State.STARTING)
    if slot is not None and config.JOINS.is_set() and launcher.uses_master:
        found = tcp.wait_outside(record, slot.read_join_info(), config.JOINS.get())
    else:
        found = launcher.connect(record, ranks, generation)
    if slot is not None:
        found = replace(found, slot=slot)
    if ranks is not None and ranks != found.size and found.rank == 0 and not config.JOINS.is_set():
        by, remedy = record.by, "The launcher's own option decides."
        if launcher.is_none:
            by, remedy = "this script's first init()", "They stay for the whole script, so pass the number there."
        warnings.warn(
            f"init(ranks={ranks}) was requested, but {by} started {found.size} "
            f"{'rank: using that' if found.size == 1 else 'ranks: using those'}. {remedy}",
            stacklevel=3,
        )
    if found.size > 1:
        os.environ[config.MEMBER.name] = f"{os.getpid()} {found.rank} {_identity()} {_identity(of_mpi=True)}"
    return found


def launcher_of(size: int) -> Launcher:
    """What has started the ranks of this process's job, which has so many: this script, if it was started alone."""
    launcher = detect().launcher
    if size == 1:
        return NONE
    return replace(SPAWNED, name="this script") if launcher.is_none else launcher


def leave(launcher: Launcher) -> None:
    """Let a child of this process join in its place, if the launcher allows that; called when it has left the job."""
    if not launcher.uses_mpi:
        os.environ.pop(config.MEMBER.name, None)


def _check_that_this_is_the_rank(record: LaunchRecord) -> None:
    """Reject a child of a rank: the launcher's variables that it inherited are those of its parent.

    Raises:
        LaunchError: a process with these variables has joined a job, and this process descends from it.
    """
    launcher = record.launcher
    if (launcher.uses_mpi or launcher.uses_master) and not launcher.is_none and _is_inherited(launcher.uses_mpi):
        pid, rank, *_ = config.MEMBER.get().split()
        raise LaunchError(
            f"this process inherited the variables of {record.by} from rank {rank} (process {pid}), but is not that "
            "rank: it is a child of it (a data loader's worker, or a script that the rank started). Call "
            "ring_plugins.init() in the ranks themselves, and put what a script does after `if __name__ == "
            '"__main__":`. A child that is to be a job of its own needs RING_LAUNCHER=single.'
        )


def _is_inherited(of_mpi: bool = False) -> bool:
    """Whether a process from which this one descends has joined a job with the same values of these variables."""
    pid, *_, everything, mpis = config.MEMBER.get().split() or ("", "", "")
    return pid not in ("", str(os.getpid())) and _identity(of_mpi) == (mpis if of_mpi else everything)


def _identity(of_mpi: bool = False) -> str:
    """Of the place that a launcher gave to this process: another launch, or another rank, has another one."""
    text = "\n".join(f"{name}={os.environ.get(name, '')}" for name in identity(of_mpi))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
