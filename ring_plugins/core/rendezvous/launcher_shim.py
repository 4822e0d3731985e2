"""Starts a script anew in ranks that may outlive each other, where what has started this process would end all of them.

A script that would spawn its ranks starts again under `ring run`.

**Under mpirun, torchrun and srun** no process that the launcher has started may die with a rank. So when
`init(on_failure="continue")` finds one of these launchers, its processes meet once, by the launcher's own means: MPI,
torchrun's store, or the first host of srun's step. They tell each other where they are and what they would run. Then
the first process of the host becomes `ring run`, in which the script begins anew in as many ranks, and each of the
others becomes a shim, which waits for the end of the first:

    mpirun ── ring run ── rank 0, rank 1, rank 2
           ├─ shim
           └─ shim

The launcher sees processes that live as long as the job does; the first ends with the job's exit status. The ranks get
none of the launcher's variables, and may use all cores to which the launcher has bound any of its processes.

**On several hosts** the first process of each host becomes the supervisor of that host's ranks
(launcher/job.py). These supervisors work together as those that `ring run` starts by ssh; the one on rank 0's
host also takes `ring run`'s part.

Considered and rejected: the launchers' own options. With `--enable-recovery` Open MPI's mpirun ends with 0 when every
rank was killed. With `-disable-auto-cleanup` MPICH's ends with 9 after a job that went on. srun's
`--kill-on-bad-exit=0` cannot be seen from inside, and torchrun has none. With none of them does anybody replace a rank.
Also rejected: shims that end at once. srun reports tasks that end before others, and may end the step (`--wait`).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, LaunchError, name_ranks
from ring_plugins.core.base.install import RING, own_python
from ring_plugins.core.base.log import flush_output, logger
from ring_plugins.core.linux.interfaces import own_addresses, reserve_port
from ring_plugins.core.linux.process import end_with_parent
from ring_plugins.core.linux.shared_memory import shared_memory_domain
from ring_plugins.core.net.mpi import world_size_if_initialized
from ring_plugins.core.rendezvous import spawn, tcp
from ring_plugins.core.rendezvous.launchers import without_launchers
from ring_plugins.core.rendezvous.record import LaunchRecord

#: What a shim runs: it waits for the end of a process, also of one whose parent has not asked how it ended. A process
#: of another time that has the same number started at another one.
_SHIM = """
import sys, time
def started():
    try:
        with open(f"/proc/{sys.argv[1]}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
first = started()
while first and started() == first:
    time.sleep(0.2)
"""


def ring_run(ranks: int, min_ranks: int, on_failure: str, max_ranks: int = 0) -> list[str]:
    """The command that runs this script under `ring run`, on ranks of this host of which each can outlive any other.

    Args:
        ranks: of the job.
        min_ranks: with how many of them the job goes on.
        on_failure: "continue" or "replace".
        max_ranks: to how many it may grow; 0 for no more than `ranks`.

    Raises:
        LaunchError: this script cannot be started again.
    """
    # -H: a scheduler may have allocated further hosts.
    where = ["-n", str(ranks), "-H", f"localhost:{ranks}", "--with", "python"]
    policy = ["--on-failure", on_failure, "--min-ranks", str(min_ranks)]
    policy += ["--max-ranks", str(max_ranks)] if max_ranks else []
    return [*own_python(RING), "run", *where, *policy, "--", *spawn.command()]


def restart_under_ring_run(ranks: int, min_ranks: int, on_failure: str, max_ranks: int = 0) -> NoReturn:
    """Replace this process by `ring_run` of its own command.

    The script runs again from its first line in every rank, as it does in all but the first where it spawns them.
    """
    again = ring_run(ranks, min_ranks, on_failure, max_ranks)
    flush_output()
    os.chdir(spawn.START_DIRECTORY)
    os.execv(sys.executable, again)


def restart_under_supervisors(
    record: LaunchRecord, min_ranks: int, on_failure: str, max_ranks: int, remedy: str
) -> NoReturn:
    """Replace this process by a supervisor of its host's ranks, which start anew, or by a shim.

    Args:
        record: of this process, which a launcher has started with others.
        min_ranks: with how many ranks the job goes on.
        on_failure: "continue" or "replace".
        max_ranks: to how many ranks it may grow; 0 for no more than those of the launcher.
        remedy: what to do where this does not work, for errors.

    Raises:
        ArgumentError: this does not work here; the text says why.
        LaunchError, MissingDependency: the processes do not find each other.
    """
    command = _command(record, on_failure, remedy)
    reserved = reserve_port() if record.rank == 0 else None  # where the supervisors of several hosts meet
    everyone = _meet(record, [command, min_ranks, on_failure, max_ranks, spawn.START_DIRECTORY], reserved)
    hosts = ranks_of_hosts(everyone)
    own = next(ranks for ranks in hosts if record.rank in ranks)
    environment = without_launchers(os.environ)
    if len(hosts) == 1:
        supervisor = ring_run(len(everyone), min_ranks, on_failure, max_ranks)
    else:
        _check_for_several_hosts(record.by, max_ranks)
        if reserved is not None:
            os.set_inheritable(reserved.fileno(), True)
            if not record.launcher.uses_mpi:
                tcp.note_missing_secret()
        supervisor = own_python("from ring_plugins.launcher import job; sys.exit(job.run_under_launcher())")
        policy = {config.ON_FAILURE.name: on_failure, config.MIN_RANKS.name: str(min_ranks)}
        policy[config.LOSSES_TOLERATED.name] = "1"
        environment |= {config.HOST_JOB.name: json.dumps(_place(everyone, hosts, own, command, policy))}
    if record.rank == 0:
        logger.info(f"the ranks start anew under `ring run`, since {record.by} would end all of them with the first")
    flush_output()
    os.chdir(spawn.START_DIRECTORY)
    _ignore(signal.SIGUSR1, signal.SIGUSR2)  # launchers send them to all; the supervisor passes them on
    if record.rank == own[0]:
        os.sched_setaffinity(0, set().union(*(everyone[rank]["cores"] for rank in own)))
        end_with_parent(signal.SIGTERM)
        os.execve(sys.executable, supervisor, environment)
    _ignore(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a shim ends with the supervisor
    end_with_parent()
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", _SHIM, str(everyone[own[0]]["pid"])], environment)


def _command(record: LaunchRecord, on_failure: str, remedy: str) -> list[str]:
    """The command with which the script starts again.

    Raises:
        ArgumentError: it cannot, or this launcher's processes could not become shims.
    """
    rejected = f'on_failure="{on_failure}" does not work under {record.by} if'
    if config.VIRTUAL_NODES.get():
        raise ArgumentError(f"{rejected} its host is to act as several: unset {config.VIRTUAL_NODES.name}.")
    if world_size_if_initialized():
        raise ArgumentError(
            f"{rejected} the script initializes MPI itself, since the job's ranks start anew in init(): leave out "
            f"mpi4py; or {remedy}."
        )
    try:
        return spawn.command()
    except LaunchError as error:
        raise ArgumentError(f"{rejected} the script cannot start again: {error}") from error


def _ignore(*numbers: signal.Signals) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _meet(record: LaunchRecord, work: Sequence[Any], reserved: socket.socket | None) -> list[dict[str, Any]]:
    """Meet the job's other processes once; returns what each tells of itself, in rank order.

    Args:
        record: of this process.
        work: what it would run, which must be the same in all.
        reserved: of rank 0, a port of its host.

    Raises:
        ArgumentError: ranks have another command.
        LaunchError, MissingDependency: they do not find each other.
    """
    own: dict[str, Any] = {
        "domain": shared_memory_domain(),
        "host": socket.gethostname(),
        "work": hashlib.sha256(json.dumps(work).encode("utf-8", "surrogateescape")).hexdigest(),
        "pid": os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    if reserved is not None:
        own |= {"addresses": own_addresses(), "port": reserved.getsockname()[1], "key": secrets.token_hex(32)}
    exchange = record.launcher.exchange
    assert exchange is not None
    everyone: list[dict[str, Any]] = exchange(record, own)
    if different := [rank for rank, one in enumerate(everyone) if one["work"] != everyone[0]["work"]]:
        raise ArgumentError(
            f"{name_ranks(different)} {'has' if len(different) == 1 else 'have'} another command, directory or "
            'min_ranks than rank 0, but with on_failure="continue" all ranks have to start alike.'
        )
    return everyone


def ranks_of_hosts(everyone: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The ranks of each host, that of rank 0 first.

    Args:
        everyone: what each rank tells of itself.
    """
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(everyone):
        ranks.setdefault(one["domain"], []).append(rank)
    return list(ranks.values())


def _check_for_several_hosts(by: str, max_ranks: int) -> None:
    where = f"does not work under {by} on several hosts, only on one"
    if max_ranks:
        raise ArgumentError(f"max_ranks={max_ranks} {where}: leave it out.")
    if standbys := config.STANDBYS.get():
        raise ArgumentError(
            f"{config.STANDBYS.name}={standbys} {where}: unset it. "
            'With on_failure="replace", lost ranks are then replaced by processes that start at that moment.'
        )


def _place(
    everyone: Sequence[Mapping[str, Any]],
    hosts: Sequence[Sequence[int]],
    own: Sequence[int],
    command: Sequence[str],
    policy: Mapping[str, str],
) -> dict[str, Any]:
    """What the supervisor of a host has to know: the fields of `HostJob`, and the names and ranks of all hosts."""
    index, first = hosts.index(own), everyone[0]
    job = {
        "addresses": first["addresses"] if index else ["127.0.0.1"],
        "port": first["port"],
        "key": first["key"],
        "index": index,
        "hosts": len(hosts),
        "ranks": own,
        "size": len(everyone),
        "command": command,
        "environment": policy,
        "patience": config.START_TIMEOUT.get(),
        "replaces": policy[config.ON_FAILURE.name] == "replace",
    }
    return {"job": job, "hosts": [(everyone[ranks[0]]["host"], ranks) for ranks in hosts]}
