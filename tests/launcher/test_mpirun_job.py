"""mpirun, for which a shell stands here, is ended if it goes on after its job; see openpmix/prrte#1839."""

import os
from types import SimpleNamespace

import pytest

from ring_plugins.launcher import job, mpirun_job
from ring_plugins.launcher.hosts import Share
from ring_plugins.launcher.launch_plan import LaunchPlan
from ring_plugins.launcher.mpirun import JobSpec, Mpirun
from ring_plugins.launcher.mpirun_job import HungMpirun
from ring_plugins.launcher.processes import Processes

#: Starts a rank, waits for it, and then for nothing.
HANGS = "sh -c 'exec sleep 0.3' & wait; exec sleep 3600"


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(mpirun_job, "_LOOK_EVERY", 0.0)
    monkeypatch.setattr(mpirun_job, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(mpirun_job, "FAILED_SECONDS", 0.2)


def wait(processes, process, hangs):
    return processes.wait(lambda: [process] if process.poll() is None else [], hangs)


def wait_for(script, is_local, failure=lambda: None):
    with Processes() as processes:
        process = processes.start(["sh", "-c", script], os.environ)
        why = wait(processes, process, HungMpirun(process.pid, is_local, failure))
    return process.returncode, why


def test_it_is_ended_on_one_host_when_nothing_below_it_is_alive():
    status, why = wait_for(HANGS, is_local=True)
    assert status != 0  # nobody knows how the ranks ended
    assert (
        why == "mpirun still ran 0.2 s after the last of its processes had ended; ended it. How they ended is unknown."
    )


def test_it_is_ended_on_several_hosts_after_a_failure():
    status, why = wait_for("sleep 3600; true", is_local=False, failure=lambda: "rank 1 failed")
    assert (status != 0, why) == (True, "mpirun still ran 0.2 s after a rank had failed; ended it.")


@pytest.mark.parametrize(("alive", "is_local"), [(True, True), (False, False), (None, True)])
def test_it_goes_on_while_ranks_may_run(monkeypatch, alive, is_local):
    """While some run here; while they may run on other hosts; before any has started."""
    first = [alive is not None]  # whether any was alive at first
    monkeypatch.setattr(mpirun_job, "children", dict)
    monkeypatch.setattr(mpirun_job, "descendants", lambda pid, family: [1] if alive or (first and first.pop()) else [])
    monkeypatch.setattr(mpirun_job, "state", lambda pid: "S")
    monkeypatch.setattr(mpirun_job, "time", SimpleNamespace(monotonic=iter(range(1, 1000)).__next__))
    hangs = HungMpirun(1, is_local, lambda: None)
    assert [hangs() for _ in range(500)] == [None] * 500


#: As PRRTE prints it.
BANNER = "PRTE has lost communication with a remote daemon."


@pytest.mark.parametrize(("printed", "status"), [(f"step 1\n{BANNER}\n", 1), ("step 1\n", 0)])
def test_a_lost_host_is_a_failure(tmp_path, capfd, printed, status):
    """Open MPI ends with status 0 then, and kills ranks that could not say anything by then."""
    script = tmp_path / "mpirun"
    script.write_text(f"#!/bin/sh\nprintf '%s' '{printed}' >&2\n")
    script.chmod(0o755)
    spec = JobSpec(("/bin/true",), 2, shares=(Share("a", 1), Share("b", 1)))
    lines: list[str] = []
    assert job.run(LaunchPlan(spec, Mpirun(str(script), "Open MPI", "5.0.11")), lines.append) == status
    assert capfd.readouterr().err == printed
    assert lines == ["mpirun lost a host and ended the ranks of the others."] * status
