"""Runs the ranks of one host under mpirun, torchrun or srun.

The first process of each host becomes this (core/rendezvous/launcher_shim.py says why and how). On the host of rank 0
it is the coordinator, too (several_hosts.py).
"""

from __future__ import annotations

import json
import os
import sys

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.launcher import host_supervisor, several_hosts
from ring_plugins.launcher.coordinator_link import HostJob
from ring_plugins.launcher.supervision import Supervisor


def main() -> int:
    """Run the job that RING_HOST_JOB describes."""
    place = json.loads(os.environ.pop(config.HOST_JOB.name))
    job = HostJob(**place["job"])
    try:
        if job.index:
            return host_supervisor.run(job)
        with Supervisor(recovers=True) as supervisor:
            status, why = several_hosts.coordinate(job, place["hosts"], supervisor, _notify)
            if why:
                _notify(why)
            if supervisor.signalled is not None:
                _notify(f"ended every rank because of {supervisor.signalled.name}.")
        return status
    except LaunchError as error:
        _notify(str(error))
        return 1


def _notify(text: str) -> None:
    print(f"ring run: {text}", file=sys.stderr, flush=True)
