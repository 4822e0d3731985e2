"""Recognizing each mpirun and building its command line; nothing is started here."""

import shlex

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.launcher import mpirun
from ring_plugins.launcher.hosts import Share
from ring_plugins.launcher.mpirun import JobSpec, Mpirun

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
