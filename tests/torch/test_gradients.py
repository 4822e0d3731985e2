"""Averaged gradients on one to four ranks; the checks themselves are in checks_gradients.py."""

import functools
import re
from pathlib import Path

import pytest

from tests.launch import Result, run_ranks

CHECKS = Path(__file__).with_name("checks_gradients.py")
NAMES = re.findall(r"@check\ndef (\w+)", CHECKS.read_text())
#: "GPU": grown, with a stand-in for the GPUs and for NCCL (tests/gpu_stand_in.py).
CASES = [("grown", 1), ("grown", 2), ("grown", 3), ("mpirun", 4), ("GPU", 2)]


@functools.lru_cache
def outcome(started_by, processes) -> Result:
    env = {"mpirun": {"RING_VIRTUAL_NODES": "2"}, "GPU": {"TEST_GPU_STAND_IN": "1"}}.get(started_by, {})
    launcher = "mpirun" if started_by == "mpirun" else "grown"
    return run_ranks(CHECKS, processes, launcher, env=env, timeout=200, check=False)


def test_gradients_on_three_gpus():
    name = "equals_one_process_on_the_concatenated_batch"
    result = run_ranks(CHECKS, 3, env={"TEST_GPU_STAND_IN": "1", "TEST_ONLY": name})
    assert result.values(name) == ["ok"] * 3
    assert min(result.values("launched by NCCL")) > 10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("started_by", "processes"), CASES)
def test_gradients(started_by, processes, name):
    result = outcome(started_by, processes)
    for rank in range(processes):
        assert result.reports.get(rank, {}).get(name) == "ok", result
        assert (result.reports[rank]["launched by NCCL"] > 100) == (started_by == "GPU")
