"""Tests that need a GPU: `pytest -m gpu`. One is enough; two ranks share it, which NCCL does slowly but correctly."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launch import REPOSITORY, Result, run_ranks

CHECKS = Path(__file__).with_name("checks_gpu.py")
NAMES = re.findall(r"@check\ndef (\w+)", CHECKS.read_text())

on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here")


@functools.lru_cache
def outcome(ranks: int) -> Result:
    shares = "1" if torch.cuda.device_count() < ranks else "0"
    return run_ranks(CHECKS, ranks, env={"RING_SHARE_GPU": shares}, timeout=280, check=False)


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("processes", [1, 2])
def test_on_a_card(processes, name):
    for rank in range(processes):
        assert outcome(processes).reports.get(rank, {}).get(name) == "ok", outcome(processes)


@pytest.mark.gpu
@on_a_card
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="two ranks would not share a card here")
def test_two_ranks_on_one_card_are_rejected():
    result = run_ranks(CHECKS, 2, timeout=60, check=False)
    assert "ranks 0, 1 would share the GPU" in result.output
    assert "RING_SHARE_GPU=1" in result.output


@pytest.mark.gpu
@on_a_card
def test_the_benchmark_measures():
    args = ["--models", "resnet50", "--batch", "2", "--seconds", "1"]
    result = run_ranks(REPOSITORY / "benchmarks/gpu_step.py", 1, args=args, timeout=250)
    assert "ring / DDP" in result.stdout


WITHOUT_KERAS = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec.__func__
hidden = ("keras", "tensorflow")

def find_spec(cls, name, *where):
    return None if name.startswith(hidden) else find(cls, name, *where)

PathFinder.find_spec = classmethod(find_spec)
"""


@pytest.mark.slow
def test_tests_for_cards_are_collected_where_keras_is_not_installed(tmp_path):
    (tmp_path / "without_keras.py").write_text(WITHOUT_KERAS)
    command = [sys.executable, "-m", "pytest", "-p", "without_keras", "-m", "gpu", "--collect-only", "-q", "tests"]
    paths = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    found = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout
    assert "tests/torch/test_gpu.py::test_on_a_card" in found.stdout


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_the_benchmark_says_that_nothing_was_measured(tmp_path):
    args = ["--trace", str(tmp_path / "step.json")]
    result = run_ranks(REPOSITORY / "benchmarks/gpu_step.py", 2, "mpirun", args=args)
    assert result.stdout.split("\n") == ["not measured here: torch sees no CUDA GPU"] * 2 + [""]
