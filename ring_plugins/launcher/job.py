"""Runs a launch plan: by mpirun, or by a coordinator and one supervisor a host, the supervisor of this host among them.

A job of one host is a job of n hosts: its coordinator and its only supervisor are in this process. It needs no login
and no port.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import sys
from collections.abc import Callable

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.launcher import host, mpirun
from ring_plugins.launcher.coordinator import Coordinator
from ring_plugins.launcher.coordinator_link import HostJob
from ring_plugins.launcher.host import Supervisor
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.launch_plan import LaunchPlan
from ring_plugins.launcher.logins import Logins
from ring_plugins.launcher.meeting import AtAnAddress, InMemory, Meeting
from ring_plugins.launcher.mpirun_job import run_mpirun
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.processes import Processes


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
        return _tell(run_mpirun(plan, processes), processes, notify)


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
        standbys=plan.standbys,
        most=plan.max_ranks,
    )
    meeting: Meeting = AtAnAddress(described) if plan.hosts else InMemory(job.ranks, plan.max_ranks)
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
        status = _coordinate(coordinator, None if here is None else described, meeting, processes, notify)
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
