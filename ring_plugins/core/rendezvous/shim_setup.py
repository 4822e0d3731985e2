"""How a job goes on without a rank under launchers that end all processes as soon as one dies: mpirun, torchrun, srun.

No process that such a launcher has started may die with a rank. So when `init(on_failure="continue")` finds one of
these launchers, each of its processes replaces itself by a tiny one that holds its slot (launcher_shim.py). The first
slot's starts `ring run` with as many ranks, and the script begins anew in those. The launcher sees processes that live
as long as the job does, and all end with its exit status:

    mpirun ── shim of slot 0 ── ring run ── rank 0, rank 1, rank 2
           ├─ shim of slot 1
           └─ shim of slot 2

The ranks get none of the launcher's variables, and are found as ranks of `ring run`. They may use all cores that the
launcher has bound any slot to.

**On several hosts** the processes first meet once, by the launcher's own means: MPI, torchrun's store, or the first
host of srun's step. They tell each other where they are and what they would run, and leave MPI in good order. Then they
become shims, too, but the first of each host starts a supervisor of that host's ranks (launcher/shim_host.py). These
supervisors work together as those that `ring run` starts by ssh; the one on rank 0's host also takes `ring run`'s part.
A process that takes the place of a lost rank is started by its host's supervisor there, too, and no shim knows of it.

Considered and rejected: a shim in every slot with its own rank below it. Those ranks would have to meet by the
launcher's own means, MPI among them, which ends the job when a rank is gone (MPICH, also with -disable-auto-cleanup) or
calls it failed (Open MPI). Options of the launchers (Open MPI's --enable-recovery, srun's --kill-on-bad-exit=0
--no-kill) would be for the user to set, and torchrun and MPICH have none.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, LaunchError, name_ranks
from ring_plugins.core.base.log import flush_output
from ring_plugins.core.base.own_python import own_python
from ring_plugins.core.linux.interfaces import own_addresses, reserve_port
from ring_plugins.core.linux.process import parent
from ring_plugins.core.linux.shared_memory import is_available, shared_memory_domain
from ring_plugins.core.net.mpi import world_size_if_initialized
from ring_plugins.core.net.socket_owner import why_users_are_unknown
from ring_plugins.core.rendezvous import launcher_shim, mpi, slurm, spawn, tcp
from ring_plugins.core.rendezvous.claim import check_is_original_script
from ring_plugins.core.rendezvous.record import LaunchRecord

#: What tells a job from others of the same launcher, and is equal in all of its slots.
_JOB = (
    "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
_TORCHRUN = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
#: Variables by which launchers tell their processes who they are. The ranks are others.
_PREFIXES = (
    "OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "MPIR_", "MV2_COMM_WORLD_", "HYDI_", "HYDRA_", "I_MPI_",
    "TORCHELASTIC_", "SLURM_",
)  # fmt: skip
_NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", config.LAUNCHER.name,
)  # fmt: skip
#: Those that tell of the whole job, or are the user's own.
_KEPT = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_ARRAY_",
    "SLURM_SUBMIT_",
    "SLURM_RESTART_COUNT",
    "OMPI_ALLOW_",
    "PRTE_ALLOW_",
)


def become_launcher_shim(
    record: LaunchRecord, min_ranks: int, on_failure: str, max_ranks: int, remedy: str
) -> NoReturn:
    """Replace this process by one that holds its launcher's slot, while the ranks run under a `ring run`.

    Args:
        record: of this process, which a launcher has started with others.
        min_ranks: with how many ranks the job goes on.
        on_failure: "continue" or "replace".
        max_ranks: to how many ranks it may grow; 0 for no more than those of the launcher.
        remedy: what to do where this does not work, for errors.

    Raises:
        ArgumentError: this does not work here; the text says why.
    """
    assert record.rank is not None
    if why := why_users_are_unknown():
        raise ArgumentError(
            f'on_failure="{on_failure}" does not work under {record.by} here, since {why}: a stranger could pose as '
            f"one of its processes. Run it as a user that the namespace knows; or {remedy}."
        )
    size = _size_on_this_host(record, on_failure, remedy)
    if size is None and max_ranks:
        raise ArgumentError(
            f"max_ranks={max_ranks} does not work under {record.by} on several hosts, only on one: leave it out."
        )
    if size is None and (standbys := config.STANDBYS.get()):
        raise ArgumentError(
            f"{config.STANDBYS.name}={standbys} does not work under {record.by} on several hosts, only on one: unset "
            f"it. "
            'With on_failure="replace", lost ranks are then replaced by processes that start at that moment.'
        )
    rejected = f'on_failure="{on_failure}" does not work under {record.by} if'
    if world_size_if_initialized():
        raise ArgumentError(
            f"{rejected} the script initializes MPI itself, since the job's ranks start anew in init(): leave out "
            f"mpi4py; or {remedy}."
        )
    try:
        check_is_original_script()
        command = spawn.command()
    except LaunchError as error:
        raise ArgumentError(f"{rejected} the script cannot start again: {error}") from error
    names = _own_variables(record)
    pid = _launcher({name: os.environ[name] for name in names if name in os.environ})
    started = launcher_shim.start_time(pid)
    if not started:
        raise ArgumentError(
            f"{rejected} its processes are in containers of their own, where they cannot see it. Run {record.by} "
            f"inside of one container, or start the job there with `ring run`; or {remedy}."
        )
    job = _digest([os.geteuid(), pid, started, *(os.environ.get(name, "") for name in _JOB)])
    work = _digest([command, min_ranks, on_failure, max_ranks, spawn.START_DIRECTORY])
    environment = environment_of_ranks(os.environ)
    if size is not None:
        slot, again = record.rank, spawn.ring_run(size, min_ranks, on_failure, max_ranks)
    else:
        policy = {config.ON_FAILURE.name: on_failure, config.MIN_RANKS.name: str(min_ranks)}
        place = _meet_on_several_hosts(record, work, command, policy)
        slot, size = place.job["ranks"].index(record.rank), len(place.job["ranks"])
        again = own_python("from ring_plugins.launcher.shim_host import main; sys.exit(main())")
        environment |= {config.HOST_JOB.name: json.dumps(place._asdict())}
    common = [work, str(pid), started, str(config.START_TIMEOUT.get())]
    own = ["other", job, str(slot), *common] if slot else ["first", job, str(size), *common, *again]
    flush_output()
    os.chdir(spawn.START_DIRECTORY)
    shim = [sys.executable, "-I", "-S", launcher_shim.__file__]
    os.execve(sys.executable, [*shim, *own], environment)


class _Place(NamedTuple):
    """What the supervisor of a host has to know.

    Attributes:
        job: the fields of `HostJob`.
        hosts: the names of all, and the ranks of each.
    """

    job: dict[str, Any]
    hosts: list[tuple[str, list[int]]]


def _meet_on_several_hosts(record: LaunchRecord, work: str, command: list[str], policy: dict[str, str]) -> _Place:
    """Meet the job's other processes once, to find out which are on which host, and where rank 0 is.

    Raises:
        ArgumentError: ranks have another command.
        LaunchError, MissingDependency: they do not find each other.
    """
    is_first = record.rank == 0
    own: dict[str, Any] = {"domain": shared_memory_domain(), "host": socket.gethostname(), "work": work}
    if is_first:
        reserved = reserve_port()
        os.set_inheritable(reserved.fileno(), True)  # the shim keeps it
        own |= {"addresses": own_addresses(), "port": reserved.getsockname()[1], "key": secrets.token_hex(32)}
        reserved.detach()
    everyone = (mpi if record.kind == "mpi" else tcp).exchange(record, own)
    if different := [rank for rank, one in enumerate(everyone) if one["work"] != everyone[0]["work"]]:
        raise ArgumentError(
            f"{name_ranks(different)} {'has' if len(different) == 1 else 'have'} another command, directory or "
            'min_ranks than rank 0, but with on_failure="continue" all ranks have to start alike.'
        )
    if is_first and record.kind != "mpi":
        tcp.note_missing_secret()
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(everyone):
        ranks.setdefault(one["domain"], []).append(rank)
    index = list(ranks).index(own["domain"])
    first = everyone[0]
    job = {
        "addresses": first["addresses"] if index else ["127.0.0.1"],
        "port": first["port"],
        "key": first["key"],
        "index": index,
        "hosts": len(ranks),
        "ranks": ranks[own["domain"]],
        "size": len(everyone),
        "command": command,
        "environment": policy,
        "patience": config.START_TIMEOUT.get(),
        "replaces": policy[config.ON_FAILURE.name] == "replace",
    }
    return _Place(job, [(everyone[own[0]]["host"], own) for own in ranks.values()])


def environment_of_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables by which a launcher tells its processes who they are."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_KEPT) or not (name.startswith(_PREFIXES) or name in _NAMES)
    }


def _size_on_this_host(record: LaunchRecord, on_failure: str, remedy: str) -> int | None:
    """The number of ranks if all of them are on this host, None if they are on several.

    Raises:
        ArgumentError: this does not work under the launcher, or not on several hosts.
    """
    local = record.local_size
    if record.kind == "mpi" and local is None and os.environ.get("SLURM_STEP_NUM_NODES") == "1":
        local = record.size  # `srun --mpi=pmix`
    is_known = record.kind == "mpi" or record.by == "srun" or "TORCHELASTIC_RUN_ID" in os.environ
    if is_known and record.size is not None and not config.VIRTUAL_NODES.get():
        if record.size == local:
            return record.size
        if is_available():
            return None
    here = f", which were to act as several (unset {config.VIRTUAL_NODES.name})" if config.VIRTUAL_NODES.get() else ""
    raise ArgumentError(
        f'on_failure="{on_failure}" does not work under {record.by} if it does not start all ranks on this host{here}. '
        "It works on one host: with mpirun, torchrun or srun, with `ring run --on-failure continue -n 4 python "
        f"train.py`, or with plain python and init(ranks=4); or {remedy}."
    )


def _own_variables(record: LaunchRecord) -> tuple[str, ...]:
    """The variables that tell a process of this launcher from all others."""
    if record.kind == "mpi":
        return mpi.IDENTITY
    return slurm.IDENTITY if record.by == "srun" else _TORCHRUN


def _launcher(own: Mapping[str, str]) -> int:
    """Process id of the launcher: the nearest ancestor that does not have the variables which it gave to this process.

    Between them may be a shell, a profiler, or whatever else the launcher was told to start. The launcher may be
    another user's (SLURM's daemon), so that its environment cannot be read. 0 if it is outside of this container.

    Args:
        own: the variables.
    """
    pid = os.getppid()
    while pid > 0:
        try:
            found = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return pid
        if not all(os.fsencode(f"{name}={value}") in found for name, value in own.items()):
            return pid
        pid = parent(pid)
    return 0


def _digest(values: list[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode("utf-8", "surrogateescape")).hexdigest()[:16]
