"""The "ring" backend of torch.distributed: the checks of checks_process_group.py under several kinds of launch."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.launch import Launcher, Result, run_ranks, shared
from tests.torch.checks_process_group import CHECKS, is_done


class Launch(NamedTuple):
    launcher: Launcher
    ranks: int
    nodes: str = ""
    gpu: str = ""  # if not empty, a stand-in for GPUs and for NCCL: see tests/gpu_stand_in.py
    slow: bool = False

    def __str__(self) -> str:
        return f"{self.launcher}-{self.ranks}-{self.nodes}{self.gpu}"


LAUNCHES = [
    Launch("spawned", 1),
    Launch("spawned", 2),
    Launch("spawned", 2, gpu="stand-in", slow=True),
    Launch("mpirun", 3, nodes="2", slow=True),
    Launch("spawned", 4, slow=True),
    Launch("torchrun", 2, nodes="2", slow=True),
]


def parameters(launch: Launch, *more: str) -> Any:
    marks = [pytest.mark.mpi] * (launch.launcher == "mpirun") + [pytest.mark.slow] * launch.slow
    return pytest.param(launch, *more, marks=marks, id="-".join([str(launch), *more]))


@shared
def launched(launch: Launch) -> Result:
    env = {"RING_VIRTUAL_NODES": launch.nodes, "TEST_GPU_STAND_IN": launch.gpu}
    if launch.launcher == "spawned":
        env["TEST_SPAWN"] = "1"
    script = Path(__file__).with_name("checks_process_group.py")
    return run_ranks(script, launch.ranks, launch.launcher, env=env, timeout=90, check=False)


@pytest.mark.parametrize(
    ("launch", "check"),
    [
        parameters(launch, check.__name__)
        for launch in LAUNCHES
        for check in CHECKS
        if is_done(check, launch.ranks, bool(launch.nodes), bool(launch.gpu))
    ],
)
def test_check(launch: Launch, check: str) -> None:
    result = launched(launch)
    for rank in range(launch.ranks):
        outcome = result.reports.get(rank, {}).get(check, "was not reached")
        assert outcome == "ok", f"rank {rank}: {outcome}\n{result if outcome == 'was not reached' else ''}"


@pytest.mark.parametrize("launch", [parameters(launch) for launch in LAUNCHES])
def test_every_launch_ends_well_and_where_it_should_by_nccl(launch: Launch) -> None:
    result = launched(launch)
    assert result.returncode == 0, result
    assert all((launches > 100) == bool(launch.gpu) for launches in result.values("launched by NCCL")), result
    assert len(result.values("launched by NCCL")) == launch.ranks


FAILING = """
import torch, torch.distributed as dist
import ring_plugins as ring, ring_plugins.torch

ring.init(ranks=2)
dist.init_process_group("ring")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
for step in range(5):
    if step == 3 and dist.get_rank() == 1:
        raise ValueError("a bad batch")
    model(torch.ones(2, 3)).sum().backward()
"""


def test_a_rank_that_fails_ends_the_others_inside_backward() -> None:
    result = run_ranks(FAILING, 2, timeout=30, check=False)
    assert result.returncode != 0
    assert "ValueError: a bad batch" in result.stderr
    assert "rank 1 failed: ValueError: a bad batch" in result.stderr  # so rank 0 learned of it
