"""What has checks of its own in tests/, on GPUs."""

import re

import pytest

from tests.gpu_rehearsal.build import REPOSITORY

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]


@pytest.mark.ranks(2, 3)
def test_sharded_optimizers(rehearse, ranks):
    checks = REPOSITORY / "tests" / "torch" / "checks_sharded_optimizer.py"
    names = re.findall(r"@check\w*\ndef (\w+)", checks.read_text())
    found = rehearse(checks, ranks=ranks, lag=100, variables_too={"TEST_DEVICE": "cuda"})
    for name in names:
        assert found.values(name) == ["ok"] * ranks, name
