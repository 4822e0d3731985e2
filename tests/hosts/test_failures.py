"""What ranks report when something goes wrong on another host."""

import contextlib
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import hosts
from tests.launch import slowness

TRAIN = """
import os, time
import numpy as np
import ring_plugins as ring
from tests.worker import report, report_pid

ring.init()
report_pid()
data = np.ones(300_000, np.float32)
while True:
    ring.all_reduce(data, out=data)
    report("steps", 1)
"""

#: As TRAIN, but each rank prints to a file of its own: what it prints may not reach the launcher over a cut cable.
LARGE = """
import sys, time
import numpy as np
import ring_plugins as ring
from tests.worker import report, report_pid, transport

ring.init()
sys.stderr = open(f"{sys.argv[1]}.{ring.rank()}", "w", buffering=1)
report("port", getattr(transport(), "_peers", [(0, 0, 0)] * ring.size())[ring.rank()][2])
report_pid()
data = np.ones(4_000_000, np.float32)
steps = 0
while True:
    ring.all_reduce(data, out=data)
    time.sleep(0.02)
    report("steps", steps := steps + 1)
"""

DIFFERENT = """
import sys, time
import numpy as np
import ring_plugins as ring
from tests.worker import report

ring.init()
for step in range(3):
    ring.all_reduce(np.ones(int(sys.argv[1])))
started = time.monotonic()
try:
    ring.all_reduce(np.ones(int(sys.argv[1]) + (ring.node_rank() == 1)))
except ring.RingError as error:
    report("error", [type(error).__name__, str(error), time.monotonic() - started])
"""


@pytest.fixture(scope="module")
def cluster():
    with hosts(2) as cluster:
        yield cluster


LAUNCHERS = {
    "sockets": lambda cluster, *given: cluster.environment(*given),
    "sockets under mpirun": lambda cluster, *given: cluster.mpirun(*given),
    "MPI": lambda cluster, *given: cluster.mpirun(*given, env={"RING_TRANSPORT": "mpi"}),
}


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_killed_on_another_host_is_named_and_everything_ends(cluster, launcher):
    with LAUNCHERS[launcher](cluster, TRAIN, 2) as job:
        job.wait_for("steps")
        job.send_signal(3, signal.SIGKILL)
        result = job.wait(20)
    assert result.returncode != 0
    if launcher == "sockets":
        for rank in range(3):
            assert f"rank {rank} ends because rank 3" in result.stderr
        assert "on host2) died without reporting an error" in result.stderr
        return
    # mpirun, and MPI itself where it moves the data, may end the ranks first, and then say so themselves.
    reports = [
        r"rank 3 \(process \d+ on host2\) died without reporting an error",
        r"process rank 3 with PID \d+ on node host2 exited on signal 9 \(Killed\)",
        *(
            [r"peer process has unexpectedly disconnected.*Peer host: host2", r"An error occurred in Socket closed"]
            if launcher == "MPI"
            else []
        ),
    ]
    assert re.search("|".join(reports), " ".join(result.stderr.split())), str(result)


def steps_of(job):
    return job.wait_for("steps")[0]


def until(happens, seconds=25):
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.05)
    return happens()


def check_that_ranks_ended(job, output):
    """Every rank has ended, and its error names both ranks, both hosts and the lost network."""
    ranks = set(job.found.values())
    assert until(lambda: not ranks & {process.pid for process in job.processes()}), job.processes()
    for rank in (0, 1):
        text = Path(f"{output}.{rank}").read_text()
        names = r"ends because rank (\d) on (host\d) cannot reach rank (\d) \(process \d+ on (host\d)\) any more"
        found = re.search(names, text)
        assert found, (output, rank, text)
        here, own, there, other = found.groups()
        assert {(here, own), (there, other)} == {("0", "host1"), ("1", "host2")}
        assert f"the network between {own} and {other} is lost, by a cut cable or a firewall" in text


@pytest.mark.mpi
def test_a_stopped_rank_is_waited_for_and_a_cut_cable_ends_both_sides_by_name(tmp_path):
    """Two launchers at once, since one cable is cut for both."""
    own = {"RING_NETWORK_TIMEOUT": "3"}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(hosts(2))
        run = [str(Path(sys.executable).parent / "ring"), "run", "-H", "host1:1,host2:1", "--interface", "eth0"]
        jobs = {
            "env": cluster.environment(LARGE, 1, [str(tmp_path / "env")], own),
            "mpi": cluster.start(
                [*run, "--no-check", sys.executable],
                LARGE,
                2,
                [str(tmp_path / "mpi")],
                {**own, "RING_TRANSPORT": "mpi"},
            ),
        }
        jobs = {name: stack.enter_context(job) for name, job in jobs.items()}
        for job in jobs.values():
            job.wait_for("steps")
            job.found = job.pids()
            job.send_signal(1, signal.SIGSTOP)
        before = {name: steps_of(job) for name, job in jobs.items()}
        time.sleep(4.5)  # longer than RING_NETWORK_TIMEOUT; data for the stopped ranks fills the kernel's buffers
        for job in jobs.values():
            job.send_signal(1, signal.SIGCONT)
        for name, job in jobs.items():
            assert until(lambda: steps_of(job) > before[name] + 2), job._result()  # noqa: B023
        cluster.cut("host2")
        for name, job in jobs.items():
            check_that_ranks_ended(job, tmp_path / name)
        assert until(lambda: jobs["mpi"].process.poll() is not None)
        # Without an answer from the other host, ssh and the launchers' helpers stay.
        cluster.mend("host2")
        for job in jobs.values():
            assert job.wait(30).returncode != 0


@pytest.mark.mpi
@pytest.mark.slow  # ranks notice it as they notice a cut cable, which is tested above
def test_a_firewall_that_closes_the_port_of_the_data_is_named_on_both_sides(cluster, tmp_path):
    own = {"RING_NETWORK_TIMEOUT": "3"}
    ports = ["--mca", "btl_tcp_port_min_v4", "20000", "--mca", "btl_tcp_port_range_v4", "100"]
    with (
        cluster.environment(LARGE, 1, [str(tmp_path / "env")], own) as env,
        cluster.mpirun(LARGE, 1, [str(tmp_path / "mpi")], {**own, "RING_TRANSPORT": "mpi"}, options=ports) as mpi,
    ):
        for job in (env, mpi):
            job.wait_for("steps")
            job.found = job.pids()
        closed = f"{env.wait_for('port')[1]},20000-20100"
        with cluster.firewall("host1", closed), cluster.firewall("host2", closed):
            check_that_ranks_ended(env, tmp_path / "env")
            check_that_ranks_ended(mpi, tmp_path / "mpi")
        for job in (env, mpi):
            assert job.wait(30).returncode != 0


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("count", "launcher"),
    [
        (100, "sockets"),
        (400_000, "MPI"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((400_000, "sockets under mpirun"), (100, "MPI"))),
    ],
)
def test_a_difference_between_hosts_is_reported_to_every_rank_at_once(cluster, count, launcher):
    result = LAUNCHERS[launcher](cluster, DIFFERENT, 2, [str(count)]).run(check=False)
    errors = result.values("error")
    assert [name for name, _, _ in errors] == ["MismatchError"] * 4, result
    for _, text, seconds in errors:
        assert f"all_reduce({count} x float64, average), but rank" in text or f"all_reduce({count + 1} x" in text
        assert seconds < 10 * slowness()
