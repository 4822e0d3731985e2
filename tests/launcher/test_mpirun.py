"""Recognizing each mpirun, building its command line, and following it.

A shell stands for an mpirun that goes on after its job; see openpmix/prrte#1839.
"""

import os
import shlex
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.launcher import job, mpirun
from ring_plugins.launcher.hosts import Share
from ring_plugins.launcher.launch_plan import LaunchPlan
from ring_plugins.launcher.mpirun import HungMpirun, JobSpec, Mpirun
from ring_plugins.launcher.processes import Processes

VERSION_TEXTS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to": ("Open MPI", "5.0.11"),
    "mpirun (Open MPI) 4.1.4\n": ("Open MPI", "4.1.4"),
    "mpirun (OpenRTE) 4.0.3\n": ("Open MPI", "4.0.3"),
    "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date:": ("MPICH", "5.0.2"),
    "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929\n": ("Intel MPI", "2021.19.0"),
}
LIBRARY_TEXTS = {
    "Open MPI v5.0.8, package: Open MPI builder@host, ident: 5.0.8, repo rev: v5.0.8": ("Open MPI", "5.0.8"),
    "MPICH Version:      4.3.1\nMPICH Release date: ...": ("MPICH", "4.3.1"),
    "MVAPICH2 Version      :\t2.3.7": ("MVAPICH", "2.3.7"),
    "Intel(R) MPI Library 2021.16 for Linux* OS\nMPICH": ("Intel MPI", "2021.16"),
}


@pytest.mark.parametrize(("text", "expected"), [*VERSION_TEXTS.items(), *LIBRARY_TEXTS.items()])
def test_launchers_and_libraries_are_identified_by_their_version_texts(text, expected):
    assert mpirun.identify(text) == expected


@pytest.mark.parametrize(("text", "expected"), VERSION_TEXTS.items())
def test_a_known_mpirun_is_recognized(text, expected):
    found = mpirun.recognize("/opt/mpirun", text)
    assert (found.flavor, found.version) == expected


def test_an_unknown_mpirun_is_rejected_by_name():
    with pytest.raises(LaunchError, match=r"/opt/mpirun is none of .* answers --version with 'LAM 7'.*--mpirun"):
        mpirun.recognize("/opt/mpirun", "LAM 7\n")


OPEN_MPI_5, OPEN_MPI_4, MPICH, INTEL_MPI = (
    Mpirun("/opt/mpirun", flavor, version)
    for flavor, version in (("Open MPI", "5.0.11"), ("Open MPI", "4.1.4"), ("MPICH", "5.0"), ("Intel MPI", "2021.9"))
)
PLAIN = JobSpec(("/bin/python", "train.py", "-n", "5"), 2)
FULL = JobSpec(
    ("/bin/python", "train.py"),
    5,
    (Share("a", 3), Share("b", 2)),
    interface="eth0",
    oversubscribed=True,
    as_root=True,
    agent="/opt/agent",
    environment={"PYTHONPATH": None, "OMP_NUM_THREADS": "2"},
    tag_output=True,
    output_directory="/logs",
    options=("--extra", "1"),
)


@pytest.mark.parametrize(
    ("program", "plain", "full"),
    [
        (
            OPEN_MPI_5,
            "-n 2 --map-by slot --bind-to none /bin/python train.py -n 5",
            (
                "--allow-run-as-root -n 5 -H a:3,b:2 --prtemca plm_ssh_agent /opt/agent"
                " --map-by slot:OVERSUBSCRIBE --bind-to none"
                " --mca btl_tcp_if_include eth0 --prtemca prte_if_include eth0"
                " --prtemca oob_tcp_keepalive_time 1 --prtemca oob_tcp_keepalive_intvl 1"
                " --prtemca oob_tcp_keepalive_probes 7"
                " --output tag,dir=/logs"
                " -x PYTHONPATH -x OMP_NUM_THREADS=2 --extra 1 /bin/python train.py"
            ),
        ),
        (
            OPEN_MPI_4,
            "-n 2 --map-by slot --bind-to none /bin/python train.py -n 5",
            (
                "--allow-run-as-root -n 5 -H a:3,b:2 --mca plm_rsh_agent /opt/agent"
                " --map-by slot:OVERSUBSCRIBE --bind-to none"
                " --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0"
                " --mca oob_tcp_keepalive_time 1 --mca oob_tcp_keepalive_intvl 1"
                " --mca oob_tcp_keepalive_probes 7"
                " --tag-output --output-filename /logs"
                " -x PYTHONPATH -x OMP_NUM_THREADS=2 --extra 1 /bin/python train.py"
            ),
        ),
        (
            MPICH,
            "-bind-to none -n 2 /bin/python train.py -n 5",
            (
                "-launcher ssh -launcher-exec /opt/agent -iface eth0 -bind-to none -prepend-rank"
                " -outfile-pattern /logs/rank.%r.out -errfile-pattern /logs/rank.%r.err -genv OMP_NUM_THREADS 2"
                " --extra 1 -hosts a:3,b:2 -n 5 /bin/python train.py"
            ),
        ),
        (
            INTEL_MPI,
            "-genv I_MPI_PIN off -n 2 /bin/python train.py -n 5",
            (
                "-launcher ssh -launcher-exec /opt/agent -iface eth0 -genv I_MPI_PIN off -prepend-rank"
                " -outfile-pattern /logs/rank.%r.out -errfile-pattern /logs/rank.%r.err -genv OMP_NUM_THREADS 2"
                " --extra 1 -host a -n 3 /bin/python train.py : -host b -n 2 /bin/python train.py"
            ),
        ),
    ],
)
def test_the_command_line_of_each_mpirun(program, plain, full):
    assert mpirun.command_line(program, PLAIN) == shlex.split(f"/opt/mpirun {plain}")
    assert mpirun.command_line(program, FULL) == shlex.split(f"/opt/mpirun {full}")


@pytest.mark.parametrize(
    ("program", "bind", "words"),
    [
        (OPEN_MPI_5, "socket", "--bind-to package"),
        (OPEN_MPI_4, "socket", "--bind-to socket"),
        (MPICH, "numa", "-bind-to numa"),
        (INTEL_MPI, "core", "-genv I_MPI_PIN on -genv I_MPI_PIN_DOMAIN core"),
    ],
)
def test_each_mpirun_gets_its_own_options_for_binding(program, bind, words):
    line = mpirun.command_line(program, JobSpec(("/bin/true",), 2, bind=bind))
    assert words in shlex.join(line)


@pytest.mark.parametrize(
    ("program", "begins"),
    [
        (MPICH, ["env", "HYDRA_LAUNCH_EXTRA_ARGS=-p 2222", "/opt/mpirun"]),
        (INTEL_MPI, ["env", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS=-p 2222", "/opt/mpirun"]),
        (OPEN_MPI_5, ["/opt/mpirun", "-n", "2", "--prtemca", "plm_ssh_agent", "/opt/agent -p 2222"]),
    ],
)
def test_an_agent_may_have_options(program, begins):
    job = JobSpec(("/bin/true",), 2, agent="/opt/agent -p 2222")
    line = mpirun.command_line(program, job)
    assert line[: len(begins)] == begins
    assert program is OPEN_MPI_5 or line[len(begins) + 2 : len(begins) + 4] == ["-launcher-exec", "/opt/agent"]


def test_an_mpirun_that_takes_too_long_to_answer_is_named_with_what_waits_longer(monkeypatch):
    def run(command, timeout, **_):
        raise mpirun.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(mpirun.subprocess, "run", run)
    with pytest.raises(
        LaunchError, match=r"--version did not end within 20 s. On a busy host, RING_START_TIMEOUT=80 wa"
    ):
        mpirun.find("/opt/mpirun")
    monkeypatch.setenv("RING_START_TIMEOUT", "80")
    with pytest.raises(LaunchError, match="within 80 s"):
        mpirun.find("/opt/mpirun")


#: Starts a rank, waits for it, and then for nothing.
HANGS = "sh -c 'exec sleep 0.3' & wait; exec sleep 3600"


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(mpirun, "_LOOK_EVERY", 0.0)
    monkeypatch.setattr(mpirun, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(mpirun, "FAILED_SECONDS", 0.2)


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
    monkeypatch.setattr(mpirun, "children", dict)
    monkeypatch.setattr(mpirun, "descendants", lambda pid, family: [1] if alive or (first and first.pop()) else [])
    monkeypatch.setattr(mpirun, "state", lambda pid: "S")
    monkeypatch.setattr(mpirun, "time", SimpleNamespace(monotonic=iter(range(1, 1000)).__next__))
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
