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
from collections.abc import Callable

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.launcher import host, mpirun
from ring_plugins.launcher.coordinator import Coordinator
from ring_plugins.launcher.coordinator_link import HostJob
from ring_plugins.launcher.discovery import HostDiscovery
from ring_plugins.launcher.host import Supervisor, tell_user
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.launch_plan import LaunchPlan
from ring_plugins.launcher.logins import Logins
from ring_plugins.launcher.meeting import Meeting
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
    with Processes() as processes, contextlib.ExitStack() as stack:
        if plan.mpirun is not None:
            return _tell(mpirun.run(plan.mpirun, plan.job, plan.is_local, processes), processes, notify)
        job, ranks = plan.job, iter(range(plan.job.ranks))
        hosts = [(part.host, [next(ranks) for _ in range(part.ranks)]) for part in job.shares if plan.hosts]
        hosts = hosts or [(socket.gethostname(), list(ranks))]
        here = next((index for index, (name, own) in enumerate(hosts) if own and is_this_host(name)), None)
        variables = {name: os.environ.get(name) if value is None else value for name, value in job.environment.items()}
        described = HostJob(
            addresses=(),
            port=0,
            key="",
            index=here or 0,
            hosts=len(hosts),
            ranks=hosts[here][1] if here is not None else (),
            size=job.ranks,
            command=job.command,
            environment={name: value for name, value in variables.items() if value is not None},
            tag_output=job.tag_output,
            output_directory=job.output_directory,
            recovers=plan.recovers,
            replaces=plan.replaces,
            standbys=plan.standbys,
            most=plan.max_ranks,
        )
        logins = None
        if plan.hosts:
            relay = stack.enter_context(Relay(False, always=True))
            logins = Logins(job, described, processes, relay, plan.own_report)
        discovery = None
        if plan.host_discovery is not None:
            discovery = HostDiscovery(plan.host_discovery, processes, notify)
        coordinator = Coordinator(
            hosts,
            processes,
            notify,
            port=0 if plan.hosts else None,
            most=plan.max_ranks,
            min_ranks=config.MIN_RANKS.get(described.environment),
            takes_requests=plan.replaces,
            logins=logins,
            discovery=discovery,
        )
        stack.enter_context(coordinator)
        link = None if here is None else coordinator.connect(here)
        coordinator.log_in()
        if link is not None:
            Supervisor(described, link, processes, Meeting(described, in_memory=not plan.hosts)).run()
        status = _tell(coordinator.finish(), processes, notify)
        if discovery is not None:
            discovery.close()
        if logins is not None:
            logins.leave()
    return status


def _tell(result: tuple[int, str | None], processes: Processes, notify: Callable[[str], None]) -> int:
    status, why = result
    if why:
        notify(why)
    if processes.signalled is not None:
        notify(f"ended every rank because of {processes.signalled.name}.")
    return status


def run_under_launcher() -> int:
    """Take part in the job that RING_HOST_JOB describes, as the first process of a host that mpirun or srun started."""
    place = json.loads(os.environ.pop(config.HOST_JOB.name))
    own = HostJob(**place["job"])
    try:
        if own.index:
            return host.run(own)
        with (
            Processes() as processes,
            Coordinator(place["hosts"], processes, tell_user, own.port, own.key) as coordinator,
        ):
            Supervisor(own, coordinator.connect(own.index), processes, Meeting(own)).run()
            return _tell(coordinator.finish(), processes, tell_user)
    except LaunchError as error:
        tell_user(str(error))
        return 1
