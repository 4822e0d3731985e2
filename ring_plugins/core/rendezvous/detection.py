"""Which launcher started this process, and how to meet the other ranks under it.

A process that finds itself alone although its environment speaks of other ranks is rejected: each such process would
train a model of its own, and all would seem to succeed. So is a child of a rank, whose inherited variables claim that
it is the rank itself.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import replace

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.rendezvous import exported, launchers, tcp
from ring_plugins.core.rendezvous.record import Launcher, LaunchRecord, Rendezvous
from ring_plugins.core.rendezvous.slots import own_slot


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
    tried = (launcher for launcher in launchers.LAUNCHERS if kind in ("", launcher.kind))
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
        exported.withdraw()  # by a rank from which this process descends
    if launcher.is_none and not config.LAUNCHER.is_set():
        _check_that_nobody_is_missing(ranks)
    _check_that_this_is_the_rank(record)
    slot = own_slot()
    if slot is not None and not config.JOINS.is_set():
        slot.start()
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
        return launchers.NONE
    return replace(launchers.SPAWNED, name="this script") if launcher.is_none else launcher


def leave(launcher: Launcher) -> None:
    """Let a child of this process join in its place, if the launcher allows that; called when it has left the job."""
    if not launcher.uses_mpi:
        os.environ.pop(config.MEMBER.name, None)


def _check_that_nobody_is_missing(ranks: int | None) -> None:
    """Reject a process that no launcher seems to have started, but whose environment speaks of others.

    Raises:
        LaunchError: the text says what is missing.
    """
    for launcher in launchers.LAUNCHERS:
        if problem := launcher.half_started(ranks):
            raise LaunchError(f"{problem}; RING_LAUNCHER=single makes it a job of its own.")


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
    text = "\n".join(f"{name}={os.environ.get(name, '')}" for name in launchers.identity(of_mpi))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
