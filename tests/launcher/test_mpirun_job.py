"""mpirun, for which a shell stands here, is ended if it goes on after its job; see openpmix/prrte#1839."""

import os
from types import SimpleNamespace

import pytest

from ring_plugins.launcher import job, mpirun_job
from ring_plugins.launcher.hosts import Share
from ring_plugins.launcher.launch_plan import LaunchPlan
from ring_plugins.launcher.mpirun import JobSpec, Mpirun
from ring_plugins.launcher.mpirun_job import HungMpirun, OtherHosts
from ring_plugins.launcher.processes import Processes

#: Starts a rank, waits for it, and then for nothing.
HANGS = "sh -c 'exec sleep 0.3' & wait; exec sleep 3600"


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(mpirun_job, "_LOOK_EVERY", 0.0)
    monkeypatch.setattr(mpirun_job, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(mpirun_job, "FAILED_SECONDS", 0.2)
    monkeypatch.setattr(mpirun_job, "ASK_EVERY", 0.0)


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


#: A login on a host that answers with the next line of a file each time.
LOGIN = """#!/bin/sh
read -r answer < "$0.answers"; sed -i 1d "$0.answers"
printf "%s: %s\\n" "$1" "$2" >> "$0.log"
echo Welcome to "$1"; echo "$answer"
"""
#: As HANGS; what mpirun starts on this host are a rank and the login to the other host's daemon.
HANGS_HERE = "PMIX_NAMESPACE=job@1 sh -c 'exec sleep 0.3' & exec sleep 60"


@pytest.fixture
def login(tmp_path):
    path = tmp_path / "login"
    path.write_text(LOGIN)
    path.chmod(0o755)
    return path


def wait_with_others(login, answers, hangs, hosts=("host2",)):
    login.with_suffix(".answers").write_text("\n".join(answers) + "\n")
    with Processes() as processes:
        process = processes.start(["sh", "-c", hangs], os.environ)
        others = OtherHosts([str(login)], hosts, process.pid, processes)
        why = wait(processes, process, HungMpirun(process.pid, False, lambda: None, others))
    return process.returncode, why, login.with_suffix(".answers").read_text().splitlines(), process.pid


ELSEWHERE = "mpirun still ran after the last rank had ended on all hosts; ended it. How they ended is unknown."


def test_it_is_ended_on_several_hosts_once_they_have_said_twice_that_no_rank_is_left(login):
    answers = ["ring ranks: 1 2", "ring ranks: 1 0", "ring ranks: 1 1", "ring ranks: 1 0", "ring ranks: 2 0", "more"]
    status, why, left, pid = wait_with_others(login, answers, HANGS_HERE)
    assert (status != 0, why, left) == (True, ELSEWHERE, ["more"])
    assert login.with_suffix(".log").read_text().startswith(f"host2: {mpirun_job._question(pid)}\n")


@pytest.mark.parametrize("silent", ["ring ranks: 0 0", "", "ring ranks: x"])  # nothing can be seen there; no answer
def test_a_host_that_cannot_be_asked_is_waited_for(login, silent):
    """Whose login, which stands below mpirun here, goes on."""
    known = ["ring ranks: 1 0"] * 2
    _, why, left, _ = wait_with_others(login, ["ring ranks: 1 0", silent, *known, "more"], f"sleep 3600 & {HANGS_HERE}")
    assert (why, left) == (ELSEWHERE, ["more"])


def test_a_host_whose_daemon_has_ended_needs_not_show_it(login):
    _, why, left, _ = wait_with_others(login, ["ring ranks: 0 0"] * 2 + ["more"], HANGS_HERE)
    assert (why, left) == (ELSEWHERE, ["more"])


def test_hosts_are_not_asked_while_a_rank_runs_here(login):
    others = SimpleNamespace(ask=lambda: pytest.fail("asked"), is_asking=False)
    with Processes() as processes:
        process = processes.start(["sh", "-c", "PMIX_NAMESPACE=job@1 sleep 0.5 & wait"], os.environ)
        assert wait(processes, process, HungMpirun(process.pid, False, lambda: None, others)) is None
    assert process.returncode == 0


def test_the_question_counts_daemons_and_ranks():
    """Of the job of one mpirun, on this host."""
    with Processes() as processes:
        for mpirun, ranks in ((4, 2), (5, 1)):  # processes of another user's host may have any number
            job = f"prterun-somehost-99999{mpirun}"
            for _ in range(ranks):
                processes.start(["sleep", "3600"], {**os.environ, "PMIX_NAMESPACE": f"{job}@1"})
            processes.start(["sh", "-c", "sleep 3600; true", "--prtemca", "ess_base_nspace", f"{job}@0"], os.environ)
        for mpirun, found in ((999994, (1, 2)), (999995, (1, 1)), (99999, (0, 0))):
            others = OtherHosts(["sh", "-c", 'eval "$1"'], ["host2"], mpirun, processes)
            others.ask()
            while (answers := others.answers()) is None:
                pass
            assert answers == [found]


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
