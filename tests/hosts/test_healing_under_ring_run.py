"""`ring run --on-failure continue` over several hosts: ranks, supervisors, logins, hosts and networks are lost."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import hosts
from tests.hosts.test_healing import UNTIL_LOST, check_that_one_side_went_on
from tests.launch import slowness
from tests.torch.test_recovery import CHECKS, check_survivors

RING = str(Path(sys.executable).parent / "ring")
SUPERVISOR = "ring_plugins.launcher.host"


@pytest.fixture(scope="module")
def cluster():
    with hosts(3) as cluster:
        yield cluster


def start(cluster, script, ranks_per_host=2, env=None, options=("--no-check",)):
    """`ring run` on host1 over all hosts, as docs/fault_tolerance.md starts train.py."""
    size = ranks_per_host * len(cluster.hosts)
    where = ["-H", ",".join(f"{host}:{ranks_per_host}" for host in cluster.hosts)]
    exported = [word for name in env or {} for word in ("-x", name)]
    command = [RING, "run", *where, "--on-failure", "continue", *exported, *options, sys.executable]
    return cluster.start(command, script, size, env=env)


def train(cluster, deaths, ranks_per_host=2, **options):
    size = str(ranks_per_host * len(cluster.hosts))
    env = {"TEST_DEATHS": json.dumps(deaths), "TEST_MIN": "1", "TEST_RANKS": size}
    return start(cluster, CHECKS, ranks_per_host, env, **options).run(60)


def test_the_others_go_on_without_rank_0_and_its_host(cluster):
    deaths = {0: [2, "barrier 3 in"]}
    result = train(cluster, deaths, 1)
    check_survivors(result, deaths, 3)
    assert " on host1) died; the job goes on with 2 of its 3 ranks" in result.output
    assert "ring run: rank 0 died, and the other 2 ended normally." in result.output
    assert "training on 3 ranks on 3 hosts, started by ring run" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        {0: [2, "barrier 3 in"], 4: [5, "in step"]},
        {2: [3, "barrier 2 in"], 3: [3, "barrier 2 in"]},
        {0: [1, "in backward"], 1: [1, "in backward"], 4: [2, "in forward"]},
    ],
    ids=str,
)
def test_ranks_and_all_of_a_host_may_be_killed(cluster, deaths):
    check_survivors(train(cluster, deaths, options=()), deaths, 6)


@pytest.mark.slow
def test_a_rank_that_gets_sigterm_leaves(cluster):
    deaths = {0: [2, "SIGTERM"], 3: [4, "in step"]}
    result = train(cluster, deaths, options=())
    check_survivors(result, deaths, 6)
    assert "ring run: rank 0 left, rank 3 died, and the other 4 ended normally." in result.output


def supervisors(job):
    """Those of other hosts than `ring run`'s, by the number of their host."""
    found = {}
    for process in job.processes():
        if SUPERVISOR in " ".join(process.cmdline()):
            ranks = [int(child.environ()["RANK"]) // 2 for child in process.children()]
            found |= dict.fromkeys(ranks, process)
    return found


@pytest.mark.slow
def test_logins_and_a_supervisor_are_killed(cluster):
    with start(cluster, UNTIL_LOST) as job:
        job.wait_for("steps")
        logins = [process for process in job.processes() if any("login.py" in word for word in process.cmdline())]
        assert len(logins) == 2
        for process in logins:
            process.kill()
        before = job.wait_for("steps")[0]
        end = time.monotonic() + 20
        while job.wait_for("steps")[5] < before + 10 and time.monotonic() < end:
            time.sleep(0.1)
        assert len(job.processes()) >= 1 + 2 + 6 and job.process.poll() is None
        supervisors(job)[1].kill()
        result = job.wait(60)
    assert result.returncode == 0, result
    assert "host2 is lost, with ranks 2, 3; the others may go on" in result.output
    found = [result.reports[rank]["found"] for rank in (0, 1, 4, 5)]
    assert all(one == found[0] for one in found) and found[0][1][-1] == [0, 1, 4, 5]


@pytest.fixture
def two_networks():
    """Logins, and what `ring run` hears from hosts, travel over eth0, and data over eth1, which is cut."""
    with hosts(3, networks={"eth0": None, "eth1": None}) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("networks", [["eth1"], ["eth0", "eth1"]])
@pytest.mark.parametrize("cut", ["host3", "host1"])
def test_the_larger_side_of_a_cut_network_goes_on_even_without_ring_run(two_networks, cut, networks):
    env = {"RING_INTERFACE": "eth1", "RING_NETWORK_TIMEOUT": "2"}
    with start(two_networks, UNTIL_LOST, env=env) as job:
        job.wait_for("steps")
        for network in networks:
            two_networks.cut(cut, network)
        result = job.wait(60, grace=20)
    own = two_networks.hosts.index(cut)
    ending = [2 * own, 2 * own + 1]
    going_on = [rank for rank in range(6) if rank not in ending]
    if cut == "host1" and len(networks) == 2:
        # What the others print is lost, and their status.
        assert result.returncode == 1, result
        assert "The ranks on host2 and host3 may have gone on" in result.output
        found = [result.reports[rank]["found"] for rank in going_on]
        assert all(one == found[0] for one in found) and found[0][1][-1] == going_on
    else:
        assert result.returncode == 0, result
        check_that_one_side_went_on(result, going_on, ending)


ENDLESS = """
import os, sys, time
import numpy as np
import ring_plugins as ring
from tests.worker import report_pid
end = os.environ.get("TEST_END")
if end == "early" and os.environ["RANK"] == "3" or end == "alone" and os.environ["RANK"] == "2":
    os.kill(os.getpid(), 9)
ring.init()
me = ring.rank()
print(f"rank {me} is on {os.uname().nodename}", flush=True)
report_pid()
for step in range(10 ** 9):
    ring.all_reduce(np.ones(10))
    if step == 5 and me == 3 and end == "exception":
        raise ValueError("a bad sample")
    if step == 5 and me == 2 and end == "status":
        os._exit(3)
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "Ctrl-C", "no more host"])
def test_nothing_outlives_ring_run(cluster, end):
    with start(cluster, ENDLESS, options=["--no-check", "--tag-output"]) as job:
        assert len(job.pids()) == 6
        # What a rank has printed may still be on its way to `ring run`.
        deadline = time.monotonic() + 20 * slowness()
        while (job.directory / "stdout").read_text().count(" is on host") < 6 and time.monotonic() < deadline:
            time.sleep(0.05)
        if end == "Ctrl-C":
            job.interrupt()
        elif end == "no more host":
            for process in supervisors(job).values():
                process.kill()
            for rank in (0, 1):  # of `ring run`'s own host, whose supervisor it is
                os.kill(job.pids()[rank], signal.SIGKILL)
        else:
            job.signal_parent(signal.Signals[end])
        result = job.wait(40)
    assert result.returncode != 0, result
    assert all(f"[{rank}] rank {rank} is on host{1 + rank // 2}\n" in result.output for rank in range(6)), result


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exception", "status", "early", "alone"])
def test_a_rank_that_fails_ends_the_job(cluster, end):
    """In the last case it is the only one of its host."""
    result = start(cluster, ENDLESS, 1 if end == "alone" else 2, env={"TEST_END": end}).run(60, check=False)
    expected = {"exception": 1, "status": 3, "early": 137, "alone": 137}
    assert result.returncode == expected[end], result
    last = {
        "exception": "rank 3 ended with exit status 1",
        "status": "rank 2 ended with exit status 3",
        "early": "rank 3 was killed by SIGKILL (out of memory? `kill -9`?) before it reached ring_plugins.init()",
        "alone": "rank 2 was killed by SIGKILL (out of memory? `kill -9`?) before it reached ring_plugins.init()",
    }
    assert last[end] in result.output.splitlines()[-1], result
    assert result.output.count("ValueError: a bad sample") >= (end == "exception")


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_ends_the_job_before_it_starts(cluster):
    command = [RING, "run", "-H", "host1:1,nowhere:1", "--no-check", "--on-failure", "continue", sys.executable]
    result = cluster.start(command, ENDLESS, 2).run(60, check=False)
    assert result.returncode == 1 and not result.reports
    assert re.search(r"nowhere: the login ended with status 255 before its ranks started", result.output), result
