"""All launchers that `init` knows: what is special about each stands here, and nowhere else.

Every launcher leaves variables in the environment. Several may have left theirs, since launchers start each other:
mpirun inside a SLURM allocation, torchrun agents started by mpirun. The innermost one counts, so they are tried in the
order of this table.

To add a launcher, add an entry. If its ranks do not meet by MPI and it sets no RANK and MASTER_ADDR, its `find` returns
these as `variables` of the record (see slurm.py), and its ranks meet by `tcp.connect`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from ring_plugins.core.base import config
from ring_plugins.core.rendezvous import mpi, record, slurm, spawn, tcp
from ring_plugins.core.rendezvous.record import Launcher, LaunchRecord, Loss, integer, read

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
