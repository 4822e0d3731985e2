"""`ring_plugins.run(hosts=...)`: a function on two hosts, its failure, and a driver that is killed."""

import signal
import sys

import pytest

from tests.hosts import hosts

pytestmark = pytest.mark.mpi

DRIVER = """
import os, socket
import numpy as np
import ring_plugins as ring
from tests.worker import report

offset = 1.0

def where(scale):
    ring.init()
    mean = ring.all_reduce(np.full(3, ring.rank() * scale + offset))
    return socket.gethostname(), ring.rank(), ring.local_rank(), os.environ["MINE"], mean.tolist()

there = {"hosts": "host1:1,host2:2", "interface": "eth0"}
report("where", ring.run(where, (2.0,), env={"MINE": "a b"}, **there), rank=0)

def fails():
    ring.init()
    if ring.rank() == 2:
        raise ValueError("on purpose")
    ring.barrier()

try:
    ring.run(fails, **there)
except ring.RankFailed as error:
    report("failed", [error.rank, error.host, repr(error.__cause__)], rank=0)
try:
    ring.run(fails, hosts="host1:1,nowhere:1")
except ring.LaunchError as error:
    report("nowhere", str(error), rank=0)

def endless():
    ring.init()
    report("pid", os.getpid())
    while True:
        ring.barrier()

ring.run(endless, **there)
"""


@pytest.mark.slow
def test_results_failures_and_a_killed_driver():
    pytest.importorskip("cloudpickle")
    with hosts(2) as cluster, cluster.start([sys.executable], DRIVER, 3) as job:
        job.wait_for("pid", timeout=100)
        found = job.reports()[0]
        job.signal_parent(signal.SIGKILL)
        result = job.wait(30)
    places = [["host1", 0, 0], ["host2", 1, 0], ["host2", 2, 1]]
    assert found["where"] == [[*place, "a b", [3.0] * 3] for place in places], result
    assert found["failed"] == [2, "host2", "ValueError('on purpose')"]
    assert "2 of 2 ranks were never started" in found["nowhere"]
    assert "Could not resolve hostname nowhere" in result.stderr
