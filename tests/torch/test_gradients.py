"""Averaged gradients on one to four ranks; the checks themselves are in checks_gradients.py."""

import functools
import re
from pathlib import Path

import pytest

from tests.launch import Result, run_ranks

CHECKS = Path(__file__).with_name("checks_gradients.py")
NAMES = re.findall(r"@check\ndef (\w+)", CHECKS.read_text())
CASES = [("grown", 1), ("grown", 2), ("grown", 3), ("mpirun", 4)]


@functools.lru_cache
def outcome(started_by, processes) -> Result:
    env = {"RING_VIRTUAL_NODES": "2"} if started_by == "mpirun" else {}
    return run_ranks(CHECKS, processes, started_by, env=env, timeout=200, check=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("started_by", "processes"), CASES)
def test_gradients(started_by, processes, name):
    result = outcome(started_by, processes)
    for rank in range(processes):
        assert result.reports.get(rank, {}).get(name) == "ok", result
