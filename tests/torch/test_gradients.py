"""Averaged gradients on one to three ranks; the checks themselves are in checks_gradients.py."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launch import Result, run_ranks
from tests.launchers import Launcher

CHECKS = Path(__file__).with_name("checks_gradients.py")
NAMES = re.findall(r"@check(\w*)\ndef (\w+)", CHECKS.read_text())


class Launch(NamedTuple):
    launcher: Launcher
    ranks: int
    nodes: str = ""
    gpu: str = ""  # where it says "GPU", a stand-in for one and for NCCL: see tests/gpu_stand_in.py

    def does(self, where: str) -> bool:
        return {"": True, "_among_several": self.ranks > 1, "_on_gpus": bool(self.gpu)}[where]

    def __str__(self) -> str:
        return "-".join(filter(None, (self.launcher, str(self.ranks), self.nodes, self.gpu)))


# Three ranks on two nodes: two of them share memory, and the halves of a host differ.
LAUNCHES = [Launch("spawned", 1), Launch("spawned", 2), Launch("mpirun", 3, "1,2"), Launch("spawned", 2, gpu="GPU")]


@functools.cache
def outcome(launch: Launch) -> Result:
    env = {"RING_VIRTUAL_NODES": launch.nodes, "TEST_GPU_STAND_IN": launch.gpu}
    return run_ranks(CHECKS, launch.ranks, launch.launcher, env=env, timeout=200, check=False)


def test_gradients_on_three_gpus() -> None:
    name = "equals_one_process_on_the_concatenated_batch"
    result = run_ranks(CHECKS, 3, env={"TEST_GPU_STAND_IN": "1", "TEST_ONLY": name})
    assert result.values(name) == ["ok"] * 3
    assert min(result.values("launched by NCCL")) > 10


@pytest.mark.parametrize(
    ("launch", "name"),
    [
        pytest.param(
            launch, name, marks=[pytest.mark.mpi] if launch.launcher == "mpirun" else [], id=f"{launch}-{name}"
        )
        for launch in LAUNCHES
        for where, name in NAMES
        if launch.does(where)
    ],
)
def test_gradients(launch: Launch, name: str) -> None:
    result = outcome(launch)
    for rank in range(launch.ranks):
        assert result.reports.get(rank, {}).get(name) == "ok", result
        assert (result.reports[rank]["launched by NCCL"] > 100) == bool(launch.gpu)
