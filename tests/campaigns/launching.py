"""Jobs of the healing campaign that are started as a user starts them, on this host or on several test hosts."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from tests.campaigns.plans import Plan
from tests.forked_ranks import LAUNCHER, Ended
from tests.hosts import Cluster, find_mpich, hosts, why_not
from tests.hosts.cluster import FAKE_SRUN
from tests.launch import Job, LaunchFailed, slowness, start_ranks
from tests.launchers import find_mpirun, launcher_command

SCRIPT = Path(__file__).with_name("launched_rank.py")
RING = str(Path(sys.executable).parent / "ring")
#: Seconds after which a job hangs, the most of them on a busy machine, and those that other processes may take to end
#: after the launcher.
HANGS, LONGEST, GRACE = 60.0, 300.0, 10.0


def missing() -> str:
    """What the campaign needs and this machine lacks; "" if nothing."""
    if find_mpirun() is None:
        return "there is no mpirun"
    return "MPICH's wheel is not installed: set TEST_MPICH" if find_mpich() is None else why_not()


def run_launched(plan: Plan) -> Ended:
    """Start a job with its launcher, and wait for its end."""
    with contextlib.ExitStack() as stack:
        number = len(plan.nodes.split(",")) if plan.nodes else 0
        cluster = stack.enter_context(hosts(number)) if number else None
        job = stack.enter_context(_started(plan, cluster))
        if any(fault.point == "stop" for fault in plan.faults):
            stack.enter_context(_stopped_for(plan.stops, job))
        return _ended(plan, job, cluster)


def _started(plan: Plan, cluster: Cluster | None) -> AbstractContextManager[Job]:
    args = [json.dumps(asdict(plan))]
    policy = ["--on-failure", "replace" if plan.replaces else "continue"]
    if cluster is not None:
        each = [int(ranks) for ranks in plan.nodes.split(",")]
        if plan.launcher == "ring run":
            where = ",".join(f"{host}:{ranks}" for host, ranks in zip(cluster.hosts, each, strict=True))
            command = [RING, "run", "-H", where, *policy, "--no-check", sys.executable]
            return cluster.start(command, SCRIPT, plan.ranks, args)
        if plan.launcher == "mpirun":
            return cluster.mpirun(SCRIPT, each, args)
        start = {"MPICH": cluster.mpich, "torchrun": cluster.torchrun, "srun": cluster.srun}[plan.launcher]
        return start(SCRIPT, each[0], args)
    env = {}
    if plan.launcher == "ring run":
        standbys = ["--standbys", str(plan.standbys)] if plan.standbys else []
        command = [RING, "run", "-n", str(plan.ranks), *policy, *standbys, "--", sys.executable]
    elif plan.launcher == "MPICH":
        home = find_mpich()
        assert home is not None
        env = {"MPI4PY_LIBMPI": str(home / "lib" / "libmpi.so.12")}
        command = [str(home / "bin" / "mpiexec"), "-n", str(plan.ranks), sys.executable]
    elif plan.launcher == "srun":
        command = [sys.executable, str(FAKE_SRUN), str(plan.ranks), sys.executable]
    else:
        command = launcher_command("spawned" if plan.launcher == "python" else plan.launcher, plan.ranks)
    return start_ranks(SCRIPT, plan.ranks, command, args, env)


@contextlib.contextmanager
def _stopped_for(seconds: float, job: Job) -> Iterator[None]:
    """Let processes of a job that have stopped themselves go on after so many seconds."""
    is_over, since = threading.Event(), dict[int, float]()

    def look() -> None:
        while not is_over.wait(0.1):
            for process in job.processes():
                with contextlib.suppress(psutil.Error):
                    if process.status() != psutil.STATUS_STOPPED:
                        since.pop(process.pid, None)
                    elif time.monotonic() > since.setdefault(process.pid, time.monotonic()) + seconds:
                        process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _ended(plan: Plan, job: Job, cluster: Cluster | None) -> Ended:
    began = time.monotonic()
    try:
        slow = slowness()
        result = job.wait(min(HANGS * slow, LONGEST) / slow, grace=GRACE)
    except LaunchFailed as failed:
        is_hang = "still running" in str(failed)
        codes: dict[int, int | None] = {LAUNCHER: None} if is_hang else {}
        left = [] if is_hang else [str(failed).splitlines()[0]]
        return Ended(codes, {}, str(failed), time.monotonic() - began, left, _faults(job.reports()))
    left = cluster.left_behind() if cluster is not None else []
    codes = codes_of(plan, result.reports, result.returncode)
    found = {process: told["found"] for process, told in result.reports.items() if "found" in told}
    return Ended(codes, found, str(result), result.seconds, left, _faults(result.reports))


def _faults(reports: dict[int, dict[str, Any]]) -> dict[int, str]:
    return {process: told["fault"] for process, told in reports.items() if "fault" in told}


def codes_of(plan: Plan, reports: dict[int, dict[str, Any]], status: int) -> dict[int, int | None]:
    """How processes ended, whose statuses only the launcher knows: by what they have told, and by its own status."""
    codes: dict[int, int | None] = {LAUNCHER: status} if status else {}
    for process in range(max([plan.ranks, *(number + 1 for number in reports)])):
        told = reports.get(process, {})
        if "found" in told:
            codes[process] = 0
        elif told.get("fault") == "died":
            codes[process] = -signal.SIGKILL
        elif told.get("fault") == "left" and not status:
            codes[process] = 0
        elif process < plan.ranks:  # others may not have been needed
            codes[process] = 1
    return codes
