"""Sharded optimizers on two hosts; the checks are those of tests/torch/test_sharded_optimizer.py."""

from pathlib import Path

import pytest

from tests.hosts import hosts

CHECKS = Path(__file__).parents[1] / "torch" / "checks_sharded_optimizer.py"
NAMES = "fifty_steps_equal_those_without_sharding", "state_in_the_ordinary_format", "whole_tensors_on_one_rank"


@pytest.mark.parametrize("per_host", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_sharded_optimizers_between_hosts(per_host):
    with hosts(2) as cluster:
        env = {"TEST_ONLY": ",".join(NAMES), "TEST_RANKS": str(2 * per_host)}
        result = cluster.environment(CHECKS.read_text(), per_host, env=env).run(timeout=300)
    for name in NAMES:
        assert result.values(name) == ["ok"] * 2 * per_host
