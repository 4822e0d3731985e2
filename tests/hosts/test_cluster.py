"""The test hosts themselves: they are separate, their network is what was asked for, and nothing stays behind."""

import subprocess
import sys
import time

import psutil
import pytest

from tests.hosts import find_mpich, hosts
from tests.launch import REPOSITORY

STREAM = """
import socket, sys, time
size = 6_000_000
if sys.argv[1] == "take":
    connection, _ = socket.create_server(("", 7000)).accept()
    data, got = bytearray(1 << 20), 0
    while got < size:
        got += connection.recv_into(data)
        began = time.monotonic() if got <= 1 << 20 else began
    print((got - (1 << 20)) * 8 / (time.monotonic() - began))
else:
    while True:
        try:
            socket.create_connection(("host2", 7000)).sendall(bytes(size))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
"""

MEET = """
import socket
import numpy as np
import ring_plugins as ring
from tests.worker import report, report_pid

ring.init()
report("sum", ring.all_reduce(np.ones(3), ring.SUM))
report("where", [socket.gethostname(), ring.node_rank(), ring.local_rank(), ring.num_nodes()])
report_pid()
"""


@pytest.fixture(scope="module")
def cluster():
    with hosts(2, networks={"eth0": "1gbit", "eth1": "100mbit"}, docker=True) as cluster:
        yield cluster


def test_a_host_has_its_own_name_network_memory_and_processes(cluster):
    say = "hostname; ls /sys/class/net; ls /dev/shm; ls -d /proc/[0-9]* | wc -l; getent hosts host1"
    output = cluster.run_on("host2", ["sh", "-c", say]).stdout.split()
    assert output[:5] == ["host2", "docker0", "eth0", "eth1", "lo"]
    assert int(output[5]) < 10
    assert output[6:] == [cluster.address("host1"), "host1"]


def test_logging_in_gives_output_status_and_sshs_own_words(cluster):
    done = cluster.run_on("host1", ["ssh", "-x", "host2", "hostname; echo $HOSTNAME_OF >&2; exit 3"], check=False)
    assert (done.stdout, done.returncode) == ("host2\n", 3)
    lost = cluster.run_on("host1", ["ssh", "nowhere", "true"], check=False)
    assert (lost.returncode, lost.stderr.partition(":")[0]) == (255, "ssh")
    with cluster.firewall("host2", "22"):
        blocked = cluster.run_on("host1", ["ssh", "-o", "ConnectTimeout=1", "host2", "true"], check=False)
    assert (blocked.returncode, blocked.stderr) == (255, "ssh: connect to host host2 port 22: Connection timed out\n")
    assert cluster.run_on("host1", ["ssh", "host2", "true"]).returncode == 0


def test_a_link_is_as_fast_as_it_was_made(cluster):
    with subprocess.Popen(
        [*cluster.enter("host2"), sys.executable, "-c", STREAM, "take"], stdout=subprocess.PIPE, text=True
    ) as taking:
        cluster.run_on("host1", [sys.executable, "-c", STREAM, "give"])
        rate = float(taking.communicate()[0])
    assert 0.5e9 < rate < 1.0e9  # below on a busy machine, above never


@pytest.mark.mpi
def test_open_mpi_mpich_and_plain_variables_start_ranks_on_all_hosts(cluster):
    expected = [[f"host{node + 1}", node, local, 2] for node in range(2) for local in range(2)]
    results = [cluster.mpirun(MEET).run(), cluster.environment(MEET).run()]
    if find_mpich() is not None:
        results.append(cluster.mpich(MEET).run())
    for result in results:
        assert result.values("where") == expected
        assert result.values("sum") == [[4.0] * 3] * 4


OWNER = """
import sys, time
from tests.hosts import hosts
script = "import time; from tests.worker import report; report('up', 1, rank=0); time.sleep(600)"
with hosts(2) as cluster, cluster.start([sys.executable], script, 1) as job:
    job.wait_for("up")
    print(*cluster._pids.values(), *(p.pid for p in job.processes()), flush=True)
    time.sleep(600)
"""


def test_nothing_survives_a_test_that_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as owner:
        try:
            pids = [int(word) for word in owner.stdout.readline().split()]
        finally:
            owner.kill()
    assert len(pids) >= 5
    end = time.monotonic() + 10
    while left := [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < end, left
        time.sleep(0.05)
