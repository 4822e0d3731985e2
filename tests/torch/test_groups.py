"""PyTorch in groups of ranks: `checks_groups.py` on several ranks, and refusals in one process."""

from pathlib import Path

import pytest
import torch
from torch import nn

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer
from tests.launch import run_ranks

CHECKS = Path(__file__).with_name("checks_groups.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started_by", "processes", "nodes"), [("spawned", 4, ""), ("mpirun", 4, "2"), ("exported", 5, "1,2,2")]
)
def test_groups(started_by, processes, nodes):
    env = {"RING_VIRTUAL_NODES": nodes} if nodes else {}
    result = run_ranks(CHECKS, processes, started_by, env=env, timeout=200)
    for rank in range(processes):
        assert {*result.reports[rank].values()} == {"ok"}


def test_a_job_of_one_rank_takes_its_group():
    ring.init()
    try:
        model = nn.Linear(1, 1)
        with pytest.raises(ring.ArgumentError, match=r"group=\[0\] is not a ring_plugins.Group"):
            DistributedOptimizer(torch.optim.SGD(model.parameters()), group=[0])
        with pytest.raises(ring.ArgumentError, match="rank 0 is not in the empty group"):
            DistributedOptimizer(torch.optim.SGD(model.parameters()), group=ring.Group([]))
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), group=ring.Group([0]), shard=True)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.close()
    finally:
        ring.shutdown()


@pytest.mark.slow
def test_a_killed_member_ends_the_training_of_its_group_and_the_job():
    script = """
        import os, signal, torch
        import ring_plugins as ring
        from ring_plugins.torch import DistributedOptimizer, broadcast_parameters
        from tests.worker import report
        ring.init(ranks=4)
        mine = ring.Group([0, 2] if ring.rank() % 2 == 0 else [1, 3])
        model = torch.nn.Linear(2, 2)
        broadcast_parameters(model)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), group=mine)
        try:
            for step in range(100_000):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                if step == 3 and ring.rank() == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
        except ring.PeerFailed as error:
            report("failed", error.rank)
            raise
    """
    result = run_ranks(script, 4, timeout=100, check=False)
    assert result.returncode != 0
    assert result.reports[1]["failed"] == 3
    assert {*result.values("failed")} == {3}  # ranks outside of the group may be ended before they say so
