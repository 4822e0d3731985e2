"""The "ring" backend of torch.distributed: every check of checks_process_group.py under every kind of launch."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launch import Launcher, Result, run_ranks
from tests.torch.checks_process_group import CHECKS


class Launch(NamedTuple):
    launcher: Launcher
    ranks: int
    nodes: str = ""
    gpu: str = ""  # a stand-in for one, and for NCCL: see tests/gpu_stand_in.py


LAUNCHES = [
    Launch("grown", 1),
    Launch("grown", 2),
    Launch("grown", 3),
    Launch("grown", 4),
    Launch("grown", 2, gpu="stand-in"),
    Launch("torchrun", 2, nodes="2"),
    pytest.param(Launch("mpirun", 3, nodes="2"), marks=pytest.mark.mpi),
]


@pytest.fixture(
    scope="module", params=LAUNCHES, ids=lambda launch: f"{launch.launcher}-{launch.ranks}-{launch.nodes}{launch.gpu}"
)
def launched(request: pytest.FixtureRequest) -> tuple[int, Result]:
    launch: Launch = request.param
    env = {"RING_VIRTUAL_NODES": launch.nodes, "TEST_GPU_STAND_IN": launch.gpu}
    if launch.launcher == "grown":
        env["TEST_GROW"] = "1"
    script = Path(__file__).with_name("checks_process_group.py")
    return launch.ranks, run_ranks(script, launch.ranks, launch.launcher, env=env, timeout=90, check=False)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_check(launched: tuple[int, Result], check: str) -> None:
    ranks, result = launched
    for rank in range(ranks):
        outcome = result.reports.get(rank, {}).get(check, "was not reached")
        assert outcome == "ok", f"rank {rank}: {outcome}\n{result if outcome == 'was not reached' else ''}"


def test_every_launch_ends_well(launched: tuple[int, Result]) -> None:
    assert launched[1].returncode == 0, launched[1]


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
    assert "rank 1 failed: ValueError: a bad batch" in result.stderr  # and so rank 0 was told
