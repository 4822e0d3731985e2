"""Starts the supervisors of a job's other hosts, by ssh or the agent that takes its place."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ring_plugins.core.base.own_python import own_python, own_python_elsewhere
from ring_plugins.core.linux.interfaces import address_towards, own_addresses
from ring_plugins.core.linux.process import silent_end
from ring_plugins.launcher.coordinator_link import HostJob
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.mpirun import JobSpec
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.preflight import LateCheck, login
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
        processes: end with the job, these among them.
        relay: passes on what they print.

    Attributes:
        check: of hosts that are added.
    """

    def __init__(self, job: JobSpec, described: HostJob, processes: Processes, relay: Relay) -> None:
        self._job, self._described, self._processes, self._relay = job, described, processes, relay
        self._started: list[tuple[str, Popen]] = []
        self.check = LateCheck(job)

    def start(self, port: int, key: str, host: str, index: int, ranks: Sequence[int] = ()) -> Popen:
        """Start a host's supervisor; one without ranks is added to the job. Returns its process, or that of its login.

        Args:
            port, key: of the coordinator.
            host, index: its name and number.
            ranks: that it is to run.
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
            is_added=not ranks,
            question=None if ranks else self.check.question,
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
        self._started.append((host, process))
        if not ranks:
            self.check.ask(host)
        return process

    def trouble(self) -> str | None:
        """Why a supervisor will not come, None while all may."""
        for host, process in self._started:
            if (code := process.poll()) is not None:
                how = silent_end(code) if code < 0 else f"ended with status {code}"
                what = "the supervisor" if is_this_host(host) else "the login"
                return f"{host}: {what} {how} before the job started; its output above says why."
        return None

    def leave(self) -> None:
        """Wait for their ends, after that of the job."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        while any(process.poll() is None for _, process in self._started) and time.monotonic() < deadline:
            time.sleep(_TICK)
