"""`ring run` over two hosts: it checks them first and ends everything on both. test_documented.py starts jobs."""

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.hosts import find_mpich, hosts

pytestmark = pytest.mark.mpi
RING = str(Path(sys.executable).parent / "ring")
TWO = ["-H", "host1:2,host2:2", "--interface", "eth0"]


def ring_run(*options):
    return [RING, "run", *options, sys.executable]


@pytest.fixture(scope="module")
def cluster():
    with hosts(3) as cluster:
        yield cluster


MEET = """
import socket
import numpy as np
import ring_plugins as ring
from tests.worker import report
ring.init()
report("where", socket.gethostname())
report("sum", float(ring.all_reduce(1.0, ring.SUM)))
"""


@pytest.mark.skipif(find_mpich() is None, reason="MPICH's wheel is not installed beside this environment")
def test_mpich_on_both_hosts(cluster):
    mpiexec = str(find_mpich() / "bin" / "mpiexec")
    # Between two network namespaces of one kernel MPICH would take shared memory.
    only_network = ["-x", "UCX_TLS=tcp,self", "-x", f"MPI4PY_LIBMPI={find_mpich()}/lib/libmpi.so.12"]
    only_network += ["--agent", "ssh -o ConnectTimeout=5"]
    result = cluster.start(ring_run(*TWO, "--mpirun", mpiexec, *only_network), MEET, 4).run(timeout=120)
    assert result.values("where") == ["host1", "host1", "host2", "host2"]
    assert result.values("sum") == [4.0] * 4


def rejected(cluster, *options, script=MEET):
    result = cluster.start(ring_run(*options), script, 4).run(timeout=30, check=False)
    assert result.returncode == 2, result
    assert result.reports == {}, "something was started all the same"
    return result.stderr


def test_a_host_with_another_version_is_named(cluster, tmp_path):
    import numpy

    (metadata,) = Path(numpy.__file__).parent.parent.glob("numpy-*.dist-info/METADATA")
    other = tmp_path / "METADATA"
    other.write_text(metadata.read_text().replace(f"Version: {numpy.__version__}", "Version: 1.24.0", 1))
    cluster.run_on("host2", ["mount", "--bind", str(other), str(metadata)])
    try:
        output = rejected(cluster, *TWO)
    finally:
        cluster.run_on("host2", ["umount", str(metadata)])
    assert (
        f"host2: numpy 1.24.0, but {numpy.__version__} on host1: pip install numpy=={numpy.__version__} there" in output
    )
    assert "host1:" not in output.replace("on host1:", "")


def test_hosts_that_cannot_be_reached_or_reach_are_named(cluster):
    with cluster.firewall("host3", "22"), cluster.firewall("host1", "1024-65534", sources="1024-65534"):
        output = rejected(cluster, "-H", "host1:1,host2:1,host3:1,nowhere:1", "--agent", "ssh -o ConnectTimeout=2")
    assert "3 of 4 hosts cannot run ranks" in output
    assert re.search(r"host3: ssh: connect to host host3 port 22: Connection timed out \(is it up", output), output
    assert re.search(r"nowhere: ssh: Could not resolve hostname nowhere.*/etc/hosts", output), output
    assert "host2: cannot connect to a port of host1: is a firewall" in output


ENDLESS = """
import time
import numpy as np
import ring_plugins as ring
from tests.worker import report_pid
ring.init()
report_pid()
while True:
    ring.all_reduce(np.ones(10))
    time.sleep(0.05)
"""


@pytest.mark.parametrize("ended", ["rank", pytest.param("interrupt", marks=pytest.mark.slow), "SIGKILL"])
def test_everything_ends_on_both_hosts(cluster, ended):
    with cluster.start(ring_run(*TWO, "--no-check"), ENDLESS, 4) as job:
        pids = job.pids()
        assert len(pids) == 4
        if ended == "rank":
            job.send_signal(3, signal.SIGKILL)
        elif ended == "interrupt":
            job.interrupt()
        else:
            job.signal_parent(signal.SIGKILL)
        result = job.wait(30)
    assert result.returncode != 0, result
    if ended == "rank":
        assert re.search(r"rank 3\b", result.output), result


#: Its mpirun takes no notice of the ranks' end: it stands still.
HANGS = """
import os, signal, time
import ring_plugins as ring
from mpi4py import MPI
from tests.worker import report
ring.init()
report("sum", float(ring.all_reduce(1.0, ring.SUM)))
rank = ring.rank()
ring.shutdown()
MPI.Finalize()
if rank == 0:
    os.kill(os.getppid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_an_mpirun_that_hangs_after_a_job_that_ended_well_is_ended(cluster):
    result = cluster.start(ring_run(*TWO), HANGS, 4).run(timeout=300, check=False)
    assert result.values("sum") == [4.0] * 4
    assert "mpirun still ran after the last rank had ended on all hosts; ended it." in result.stderr, result
    assert result.returncode != 0
