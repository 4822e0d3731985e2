"""Runs a launch plan: by mpirun, or by a coordinator and one supervisor a host, the supervisor of this host among them.

A job of one host is a job of n hosts: its coordinator and its only supervisor are in this process. It needs no login
and no port.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.control.parent_notifier import ParentNotifier
from ring_plugins.core.rendezvous.spawn import as_status
from ring_plugins.launcher import host, mpirun, preflight
from ring_plugins.launcher.coordinator import Coordinator
from ring_plugins.launcher.coordinator_link import HostJob
from ring_plugins.launcher.host import Supervisor
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.hung_mpirun import HungMpirun, OtherHosts
from ring_plugins.launcher.launch_plan import LaunchPlan
from ring_plugins.launcher.logins import Logins
from ring_plugins.launcher.lost_host import LostHost
from ring_plugins.launcher.meeting import AtAnAddress, InMemory, Meeting
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.processes import Processes

_DEAF = "ended every rank because the thread that reads mpirun's errors died; its traceback is above."


def shell_command(plan: LaunchPlan) -> str:
    """The command that `run` runs, in a form that can be pasted into a shell."""
    if plan.mpirun is not None:
        return shlex.join(mpirun.command_line(plan.mpirun, plan.job))
    variables = [f"{name}={value}" for name, value in plan.job.environment.items() if value is not None]
    command = shlex.join(["env", *variables, *plan.job.command] if variables else plan.job.command)
    where = ", ".join(f"{part.ranks} on {part.host}" for part in plan.job.shares if plan.hosts)
    return f"{command}  # ranks: {where}" if where else command


def run(plan: LaunchPlan, notify: Callable[[str], None]) -> int:
    """Run a job to its end.

    Args:
        plan: the job and what starts it.
        notify: shows one line to the user.

    Returns:
        The exit status: 0 only if every rank exited with 0, or, where losses are tolerated, all that were not killed.
    """
    if plan.mpirun is None:
        return _run_on_hosts(plan, notify)
    with Processes() as processes:
        return _tell(_run_mpirun(plan, processes), processes, notify)


def _tell(result: tuple[int, str | None], processes: Processes, notify: Callable[[str], None]) -> int:
    status, why = result
    if why:
        notify(why)
    if processes.signalled is not None:
        notify(f"ended every rank because of {processes.signalled.name}.")
    return status


def _run_on_hosts(plan: LaunchPlan, notify: Callable[[str], None]) -> int:
    """Run a job without mpirun, on this host or on several."""
    job, ranks = plan.job, iter(range(plan.job.ranks))
    hosts = [(part.host, [next(ranks) for _ in range(part.ranks)]) for part in job.shares if plan.hosts]
    hosts = hosts or [(socket.gethostname(), list(ranks))]
    here = next((index for index, (name, own) in enumerate(hosts) if own and is_this_host(name)), None)
    environment = {name: os.environ.get(name) if value is None else value for name, value in job.environment.items()}
    described = HostJob(
        addresses=(),
        port=0,
        key="",
        index=here or 0,
        hosts=len(hosts),
        ranks=hosts[here][1] if here is not None else (),
        size=job.ranks,
        command=job.command,
        environment={name: value for name, value in environment.items() if value is not None},
        tag_output=job.tag_output,
        output_directory=job.output_directory,
        recovers=plan.recovers,
        replaces=plan.replaces,
        most=plan.max_ranks,
    )
    own = replace(described, standbys=plan.standbys, relays=bool(plan.hosts), reads_input=not plan.hosts)
    meeting: Meeting = AtAnAddress(own) if plan.hosts else InMemory(job.ranks, plan.max_ranks)
    with Processes() as processes, contextlib.ExitStack() as stack:
        logins = None
        if plan.hosts:
            logins = Logins(job, described, processes, stack.enter_context(Relay(False, always=True)))
        coordinator = Coordinator(
            hosts,
            processes,
            notify,
            port=0 if plan.hosts else None,
            most=plan.max_ranks,
            min_ranks=config.MIN_RANKS.get(described.environment),
            takes_requests=plan.replaces,
            logins=logins,
        )
        stack.enter_context(coordinator)
        for index, (name, ranks_there) in enumerate(hosts):
            if logins is not None and index != here:
                logins.start(coordinator.port, coordinator.key, name, index, ranks_there)
        status = _coordinate(coordinator, None if here is None else own, meeting, processes, notify)
        if logins is not None:
            logins.leave()
    return status


def _coordinate(
    coordinator: Coordinator,
    own: HostJob | None,
    meeting: Meeting,
    processes: Processes,
    notify: Callable[[str], None],
) -> int:
    """Follow a job to its end.

    Args:
        coordinator: of the job.
        own: what is to run on this host, if anything is.
        meeting: of its ranks.
        processes: of this host.
        notify: shows one line to the user.
    """
    if own is not None:
        Supervisor(own, coordinator.connect(own.index), processes, meeting).run()
    return _tell(coordinator.finish(), processes, notify)


def run_under_launcher() -> int:
    """Take part in the job that RING_HOST_JOB describes, as the first process of a host that mpirun or srun started."""
    place = json.loads(os.environ.pop(config.HOST_JOB.name))
    own = HostJob(**place["job"])
    try:
        if own.index:
            return host.run(own)
        meeting = AtAnAddress(own)
        with (
            Processes() as processes,
            Coordinator(place["hosts"], processes, _say, own.port, own.key) as coordinator,
        ):
            return _coordinate(coordinator, own, meeting, processes, _say)
    except LaunchError as error:
        _say(str(error))
        return 1


def _say(text: str) -> None:
    print(f"ring run: {text}", file=sys.stderr, flush=True)


def _run_mpirun(plan: LaunchPlan, processes: Processes) -> tuple[int, str | None]:
    assert plan.mpirun is not None
    with ParentNotifier() as notifier, contextlib.ExitStack() as stack:
        environment = {**os.environ, **notifier.environment}
        lost = stack.enter_context(LostHost()) if plan.mpirun.flavor == "Open MPI" and not plan.is_local else None
        # On SIGTERM mpirun ends its ranks on all hosts; whatever remains on this one is killed.
        process = processes.start(
            mpirun.command_line(plan.mpirun, plan.job),
            environment,
            end_signal=signal.SIGTERM,
            stderr=None if lost is None else lost.stderr,
        )
        if lost is not None:
            lost.start()
        others = _other_hosts(plan, process.pid, processes)
        hangs = HungMpirun(process.pid, plan.is_local, notifier.first_message, others)

        def find_trouble() -> str | None:
            return _DEAF if lost is not None and lost.has_died else hangs()

        why = processes.wait(lambda: [process] if process.poll() is None else [], find_trouble)
        stack.close()
        if processes.ending is not None:
            status = 128 + processes.ending
        else:
            status = as_status(process.returncode) or (1 if why else 0)
        if lost is not None and lost.has_died:
            return status or 1, _DEAF
        cause = notifier.first_message() if processes.signalled is None else None
        if cause is None and lost is not None and lost.found:
            cause = "mpirun lost a host and ended the ranks of the others"
        # Open MPI 5 exits with 0 after it has lost a host. The cause is repeated as the last line: what the ranks
        # printed stands above mpirun's own banners.
        return status or (1 if cause else 0), why or (cause and f"{cause.rstrip('.')}.")


def _other_hosts(plan: LaunchPlan, mpirun: int, processes: Processes) -> OtherHosts | None:
    """The hosts to ask whether ranks still run there, None if that is not possible."""
    hosts = [part.host for part in plan.job.shares if part.ranks and not is_this_host(part.host)]
    is_known = plan.mpirun is not None and plan.mpirun.uses_prrte and not plan.is_local and plan.job.shares
    return OtherHosts(preflight.login(plan.job), hosts, mpirun, processes) if is_known else None
