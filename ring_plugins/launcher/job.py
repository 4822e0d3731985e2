"""Carrying out a plan: the ranks run, this process watches, and all end together."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping

from ring_plugins.core.control.failure_detector import ParentNotifier
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment, ending
from ring_plugins.launcher import mpirun
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.plan import Plan
from ring_plugins.launcher.supervision import Supervisor


def printable(plan: Plan) -> str:
    """What is run, so that it can be pasted into a shell."""
    if plan.by is not None:
        return shlex.join(mpirun.command_line(plan.by, plan.request))
    exports = [f"{name}={value}" for name, value in plan.request.exports.items() if value is not None]
    return shlex.join(["env", *exports, *plan.request.command] if exports else plan.request.command)


def carry_out(plan: Plan, say: Callable[[str], None]) -> int:
    """Run the job to its end.

    Args:
        plan: what to run.
        say: prints a line for the user.

    Returns:
        The exit status: 0 only if every rank ended with 0.
    """
    with Supervisor() as supervisor:
        status, why = _by_mpirun(plan, supervisor) if plan.by is not None else _by_ourselves(plan, supervisor)
        if why:
            say(why)
        if supervisor.signalled is not None:
            say(f"ended every rank because of {supervisor.signalled.name}.")
    return status


def _by_mpirun(plan: Plan, supervisor: Supervisor) -> tuple[int, str | None]:
    assert plan.by is not None
    # SIGTERM lets mpirun end its ranks on all hosts; what is left here is killed.
    with ParentNotifier() as starter:
        environment = {**os.environ, **starter.environment}
        supervisor.start(mpirun.command_line(plan.by, plan.request), environment, signal.SIGTERM)
        status, why = supervisor.wait()
        # Open MPI 5 ends with 0 where it lost a host.
        return status or (1 if starter.heard() else 0), why


def _by_ourselves(plan: Plan, supervisor: Supervisor) -> tuple[int, str | None]:
    request, ranks = plan.request, plan.request.ranks
    segment = Segment.create(SharedMemoryRendezvous.nbytes(ranks))
    meeting = SharedMemoryRendezvous(segment, 0, ranks, [])
    own: Mapping[str, str] = {name: value for name, value in request.exports.items() if value is not None}
    with Relay(request.tag_output, request.output_directory) as relay:
        for rank in range(ranks):
            out, err = relay.files(rank)
            supervisor.start(
                request.command,
                {**os.environ, **own, **child_environment(segment, rank, ranks, 0)},
                pass_fds=[segment.fd],
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        relay.start()

        def look() -> str | None:
            """A rank that has ended without ever meeting the others, who wait for it."""
            arrived = [meeting.has_arrived(rank) for rank in range(ranks)]
            for rank, process in enumerate(supervisor.processes):
                if any(arrived) and not arrived[rank] and process.poll() is not None:
                    return (
                        f"rank {rank} ended ({ending(process.returncode)}) before it reached ring_plugins.init(), "
                        "where the others wait for it; its own output says why."
                    )
            return None

        status, why = supervisor.wait(look)
    return status, why or _worst(supervisor)


def _worst(supervisor: Supervisor) -> str | None:
    """The rank that ended badly, for a user who sees no traceback because it was killed."""
    for rank, process in enumerate(supervisor.processes):
        if process.returncode and supervisor.signalled is None:
            return f"rank {rank} ended with {ending(process.returncode)}."
    return None


def say(text: str) -> None:
    """Print a line for the user beside the ranks' own output."""
    print(f"ring run: {text}", file=sys.stderr, flush=True)
