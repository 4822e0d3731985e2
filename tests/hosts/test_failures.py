"""What the ranks of one host learn when something goes wrong on another."""

import signal

import pytest

from tests.hosts import hosts

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


def starts(cluster):
    return [cluster.environment_start, cluster.mpirun_start]


@pytest.mark.mpi
def test_a_rank_killed_on_another_host_is_named_and_everything_ends(cluster):
    for start in starts(cluster):
        with start(TRAIN, 2) as job:
            job.wait_for("steps")
            job.send_signal(3, signal.SIGKILL)
            result = job.wait(20)
        assert result.returncode != 0
        if start == cluster.environment_start:  # mpirun may end them before they can speak
            for rank in range(3):
                assert f"rank {rank} ends because rank 3" in result.stderr
            assert "on host2) died without a word" in result.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("count", [100, 400_000])
def test_what_differs_between_hosts_is_told_to_every_rank_at_once(cluster, count):
    for start in starts(cluster):
        with start(DIFFERENT, 2, [str(count)]) as job:
            result = job.wait(30)
        errors = result.values("error")
        assert [name for name, _, _ in errors] == ["MismatchError"] * 4, result
        for _, text, seconds in errors:
            assert f"all_reduce({count} x float64, average), but rank" in text or f"all_reduce({count + 1} x" in text
            assert seconds < 10
