"""Which mpirun it is, and what it is told, for each: nothing is started here."""

import shlex

import pytest

from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.launcher import mpirun
from ring_plugins.launcher.environment import exported_variables
from ring_plugins.launcher.hosts import Share
from ring_plugins.launcher.mpirun import Mpirun, Request

SAID = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to": ("Open MPI 5", "5.0.11"),
    "mpirun (Open MPI) 4.1.4\n": ("Open MPI 4", "4.1.4"),
    "mpirun (OpenRTE) 4.0.3\n": ("Open MPI 4", "4.0.3"),
    "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date:": ("MPICH", "5.0.2"),
    "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929\n": ("Intel MPI", "2021.19.0"),
}


@pytest.mark.parametrize(("said", "expected"), SAID.items(), ids=[flavour for flavour, _ in SAID.values()])
def test_every_mpirun_is_recognised_by_its_version(said, expected):
    found = mpirun.recognize("/opt/mpirun", said)
    assert (found.flavour, found.version) == expected


def test_a_strangers_mpirun_is_refused_by_name():
    with pytest.raises(LaunchError, match=r"/opt/mpirun is none of .* it says 'LAM 7'.*--mpirun"):
        mpirun.recognize("/opt/mpirun", "LAM 7\n")


PLAIN = Request(("/bin/python", "train.py", "-n", "5"), 2)
FULL = Request(
    ("/bin/python", "train.py"),
    5,
    (Share("a", 3), Share("b", 2)),
    interface="eth0",
    crowded=True,
    as_root=True,
    agent="/opt/agent",
    exports={"PYTHONPATH": None, "OMP_NUM_THREADS": "2"},
    tag_output=True,
    output_directory="/logs",
    options=("--extra", "1"),
)


@pytest.mark.parametrize(
    ("flavour", "plain", "full"),
    [
        (
            "Open MPI 5",
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
            "Open MPI 4",
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
            "MPICH",
            "-bind-to none -n 2 /bin/python train.py -n 5",
            (
                "-launcher ssh -launcher-exec /opt/agent -iface eth0 -bind-to none -prepend-rank"
                " -outfile-pattern /logs/rank.%r.out -errfile-pattern /logs/rank.%r.err -genv OMP_NUM_THREADS 2"
                " --extra 1 -hosts a:3,b:2 -n 5 /bin/python train.py"
            ),
        ),
        (
            "Intel MPI",
            "-genv I_MPI_PIN off -n 2 /bin/python train.py -n 5",
            (
                "-launcher ssh -launcher-exec /opt/agent -iface eth0 -genv I_MPI_PIN off -prepend-rank"
                " -outfile-pattern /logs/rank.%r.out -errfile-pattern /logs/rank.%r.err -genv OMP_NUM_THREADS 2"
                " --extra 1 -host a -n 3 /bin/python train.py : -host b -n 2 /bin/python train.py"
            ),
        ),
    ],
)
def test_what_each_mpirun_is_told(flavour, plain, full):
    program = Mpirun("/opt/mpirun", flavour, "1")
    assert mpirun.command_line(program, PLAIN) == shlex.split(f"/opt/mpirun {plain}")
    assert mpirun.command_line(program, FULL) == shlex.split(f"/opt/mpirun {full}")


@pytest.mark.parametrize(
    ("flavour", "bind", "said"),
    [
        ("Open MPI 5", "socket", "--bind-to package"),
        ("Open MPI 4", "socket", "--bind-to socket"),
        ("MPICH", "numa", "-bind-to numa"),
        ("Intel MPI", "core", "-genv I_MPI_PIN on -genv I_MPI_PIN_DOMAIN core"),
    ],
)
def test_binding_in_each_ones_words(flavour, bind, said):
    line = mpirun.command_line(Mpirun("/opt/mpirun", flavour, "1"), Request(("/bin/true",), 2, bind=bind))
    assert said in shlex.join(line)


@pytest.mark.parametrize(
    ("flavour", "begins"),
    [
        ("MPICH", ["env", "HYDRA_LAUNCH_EXTRA_ARGS=-p 2222", "/opt/mpirun"]),
        ("Intel MPI", ["env", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS=-p 2222", "/opt/mpirun"]),
        ("Open MPI 5", ["/opt/mpirun", "-n", "2", "--prtemca", "plm_ssh_agent", "/opt/agent -p 2222"]),
    ],
)
def test_an_agent_with_options(flavour, begins):
    request = Request(("/bin/true",), 2, agent="/opt/agent -p 2222")
    line = mpirun.command_line(Mpirun("/opt/mpirun", flavour, "1"), request)
    assert line[: len(begins)] == begins
    assert flavour == "Open MPI 5" or line[len(begins) + 2 : len(begins) + 4] == ["-launcher-exec", "/opt/agent"]


def test_variables_that_training_reads_go_along():
    here = {
        "RING_TIMEOUT": "5", "NCCL_DEBUG": "INFO", "KERAS_BACKEND": "jax", "XLA_FLAGS": "", "PYTHONPATH": "/here",
        "HOME": "/root", "SSH_AUTH_SOCK": "/tmp/x", "RING_SPAWNED": "3:1:2:9", "MINE": "1",
    }  # fmt: skip
    found = exported_variables(["MINE", "YOURS=2"], 3, "eth0", here)
    assert found == {
        "KERAS_BACKEND": None, "NCCL_DEBUG": None, "PYTHONPATH": None, "RING_TIMEOUT": None, "XLA_FLAGS": None,
        "OMP_NUM_THREADS": "3", "RING_INTERFACE": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0",
        "MINE": None, "YOURS": "2",
    }  # fmt: skip
    assert set(exported_variables([], 3, "10.2.0.0/16", {})) == {"OMP_NUM_THREADS", "RING_INTERFACE"}
    said_by_the_user = {"OMP_NUM_THREADS": "7", "NCCL_SOCKET_IFNAME": "ib0"}
    kept = exported_variables([], 3, "eth0", said_by_the_user)
    assert kept["OMP_NUM_THREADS"] is None
    assert kept["NCCL_SOCKET_IFNAME"] is None
    with pytest.raises(ArgumentError, match="-x NOWHERE: it is not set here"):
        exported_variables(["NOWHERE"], 1, None, {})
