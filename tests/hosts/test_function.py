"""`ring_plugins.run(hosts=...)`: a function on two hosts, its failure, lost ranks, and a driver that is killed."""

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


LOSSES = """
import os, signal, socket, time
import torch
import ring_plugins as ring
from tests.worker import report

def train(policy):
    from ring_plugins.core.world import current
    from ring_plugins.torch import DistributedOptimizer, TrainingState
    ring.init()
    slot, is_new = ring.rank(), current().is_joining
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    state = TrainingState(model=model, optimizer=optimizer, step=0)
    while state.step < 10 or (policy == "replace" and max(current().world_ranks) < 4):
        if slot == 1 and state.step == 3 and not is_new:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        time.sleep(0.02)
        state.commit()
    return socket.gethostname(), slot, is_new, state.step, model.weight.tolist()

for policy in ("continue", "replace"):
    results = ring.run(train, (policy,), hosts="host1:2,host2:2", on_failure=policy, min_ranks=2)
    report(policy, [list(results), results.lost], rank=0)
"""


@pytest.mark.slow
def test_a_lost_rank_costs_only_its_result_or_another_process_returns_it():
    pytest.importorskip("cloudpickle")
    with hosts(2) as cluster:
        result = cluster.start([sys.executable], LOSSES, 1).run(150)
    left, lost = result.reports[0]["continue"]
    assert [one[:2] for one in left] == [["host1", 0], ["host2", 2], ["host2", 3]] and list(lost) == ["1"], result
    everyone, lost = result.reports[0]["replace"]
    assert [one[:3] for one in everyone] == [[f"host{1 + slot // 2}", slot, slot == 1] for slot in range(4)]
    assert not lost and all(one[3:] == everyone[0][3:] for one in everyone)
