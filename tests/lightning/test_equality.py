"""Training with ours gives what DDP gives, and every rank the same bits."""

from functools import cache
from pathlib import Path

import pytest

from tests.launch import Result, run_ranks
from tests.lightning.scenarios import SCENARIOS

WORKER = Path(__file__).with_name("equality_worker.py")


@cache
def equality(size: int) -> Result:
    """One launch a world size; every scenario reports from it."""
    return run_ranks(WORKER, size, timeout=200)


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in (1, 2, 3) for name, entry in SCENARIOS.items() if size in entry.ranks]
)
def test_scenario(size: int, name: str) -> None:
    found = equality(size).values(name)
    assert len(found) == size
    for rank, comparison in enumerate(found):
        assert "error" not in comparison, comparison["error"]
        assert comparison["compared"] > 0
        assert comparison["missing"] == []
        assert comparison["disagreements"] == [], f"rank {rank} differs from others"
        entry = SCENARIOS[name]
        tolerance = 0.0 if entry.exact and entry.same_as_ddp and size < 3 else TOLERANCE.get(name, 1e-5)
        too_large = {key: value for key, value in comparison["differences"].items() if not value <= tolerance}
        assert too_large == {}


# One bfloat16 unit in the last place of values near 1.
TOLERANCE = {"precision_bf16_true": 1.6e-2, "resume_mid_training": 0.0}


def test_a_world_of_one_has_no_process_group() -> None:
    assert equality(1).values("backend") == [None]
    assert equality(2).values("backend") == ["ring", "ring"]
