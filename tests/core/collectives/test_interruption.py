"""Interrupted waits, inside a host and between hosts; the checks themselves are in checks_interruption.py."""

import re
from pathlib import Path

import pytest

from tests.launch import Result, run_ranks, shared

CHECKS = Path(__file__).with_name("checks_interruption.py")
NAMES = re.findall(r"@check\ndef (\w+)", CHECKS.read_text())
#: Needs a launcher: ranks that a script spawned cannot meet again.
AFTERWARDS = "the_job_goes_on_after_shutdown_and_init"
LAUNCHES = [("spawned", ""), ("exported", "1,1,1"), ("mpirun", "1,2")]


@shared
def outcome(launcher: str, nodes: str) -> Result:
    return run_ranks(CHECKS, 3, launcher, env={"RING_VIRTUAL_NODES": nodes}, check=False)


@pytest.mark.parametrize(
    ("launcher", "nodes", "name"),
    [
        pytest.param(*launch, name, marks=pytest.mark.slow if launch[0] == "exported" else ())
        for launch in LAUNCHES
        for name in NAMES + [AFTERWARDS] * (launch[0] != "spawned")
    ],
)
def test_interruption(launcher: str, nodes: str, name: str) -> None:
    result = outcome(launcher, nodes)
    for rank in range(3):
        assert result.reports.get(rank, {}).get(name) == "ok", result
