"""Starts the supervisors of a job's other hosts, by ssh or the agent that takes its place."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ring_plugins.core.base.install import own_python, own_python_elsewhere
from ring_plugins.core.base.threads import until
from ring_plugins.core.linux.interfaces import address_towards, own_addresses
from ring_plugins.launcher.coordinator_link import HostJob
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.mpirun import JobSpec
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.preflight import Report, differences, is_report, login, question_about
from ring_plugins.launcher.processes import Popen, Processes

#: Seconds that logins have to end after the job, and between two looks.
_LEAVE_SECONDS, _TICK = 10.0, 0.05
#: What runs the supervisor of a host.
_SUPERVISE = "from ring_plugins.launcher.host import main; sys.exit(main())"


def command_for(job: JobSpec, host: str) -> list[str]:
    """The command that starts the supervisor of a host."""
    program = job.command[0]
    python = program if Path(program).name.startswith("python") else sys.executable
    if is_this_host(host):
        return own_python(_SUPERVISE)
    paths = [name for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in job.environment and name in os.environ]
    remote = shlex.join(
        ["env", *(f"{name}={os.environ[name]}" for name in paths), *own_python_elsewhere(python, _SUPERVISE)]
    )
    alive = [] if job.agent else ["-o", "ServerAliveInterval=15"]  # a firewall may drop a login that is idle
    return [*login(job), *alive, host, f"cd {shlex.quote(os.getcwd())} 2>/dev/null; exec {remote}"]


class Logins:
    """Starts the supervisors of a job's other hosts.

    Args:
        job: the job.
        described: what all supervisors have to know; each gets its own host's part.
        processes: of this job, which the logins join: they end together.
        relay: passes on what they print.
        own: this host's report, with which those of added hosts are compared; None to compare nothing.
    """

    def __init__(
        self, job: JobSpec, described: HostJob, processes: Processes, relay: Relay, own: Report | None = None
    ) -> None:
        self._job, self._described, self._processes, self._relay, self._own = job, described, processes, relay, own

    def start(self, port: int, key: str, host: str, index: int, ranks: Sequence[int], is_added: bool) -> Popen:
        """Start a host's supervisor. Returns its process, or that of its login.

        Args:
            port, key: of the coordinator.
            host, index: its name and number.
            ranks: that it is to run.
            is_added: whether the job has begun without it.
        """
        towards = "" if is_this_host(host) else address_towards(host.rpartition("@")[2])
        addresses = ["127.0.0.1"] if is_this_host(host) else [*filter(None, [towards]), *own_addresses()]
        told = replace(
            self._described,
            addresses=list(dict.fromkeys(addresses)),
            port=port,
            key=key,
            index=index,
            hosts=max(self._described.hosts, index + 1),
            ranks=ranks,
            is_added=is_added,
            question=question_about(self._job, None) if is_added and self._own is not None else None,
        )
        command = command_for(self._job, host)
        out, err = self._relay.files(index)
        description = os.memfd_create("ring_plugins/job")  # secrets are among it, so it is the standard input
        try:
            os.write(description, told.pack())
            os.lseek(description, 0, os.SEEK_SET)
            process = self._processes.start(
                command,
                os.environ,
                end_signal=signal.SIGTERM,
                stdin=description,
                stdout=out,
                stderr=err,
                own_session=command[0] != sys.executable,  # Ctrl-C is for the ranks, not for their logins
                is_helper=True,
            )
        finally:
            os.close(description)
        self._relay.start()
        return process

    def problems(self, host: str, report: Any) -> list[str]:
        """Why an added host cannot run ranks, each reason with its remedy.

        Args:
            host: its name.
            report: what its supervisor has told of it.
        """
        if self._own is None or is_this_host(host):  # whose supervisor may have another Python than the ranks
            return []
        if not is_report(report):
            return ["has another release of ring_plugins: install it there from what it was installed from here."]
        return differences(self._own, report)

    def leave(self) -> None:
        """Wait until all logins have ended, after the end of the job."""
        until(lambda: all(process.poll() is not None for process in self._processes.helpers), _LEAVE_SECONDS, _TICK)
