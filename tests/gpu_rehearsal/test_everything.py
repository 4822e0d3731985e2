"""What has checks of its own in tests/, on GPUs."""

import json
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


@pytest.mark.parametrize(
    "program",
    ["equals_ddp", "equals_ddp registered", "lightning_fit", "two_streams", "keras_on_torch", "graph_at_exit"],
)
def test_programs_of_the_day_with_a_card(rehearse, program):
    """tests/gpu/run.sh runs them on a card."""
    name, _, registered = program.partition(" ")
    variables = {"RING_NCCL_REGISTER": str(int(bool(registered)))}
    output = rehearse(REPOSITORY / "tests" / "gpu" / f"{name}.py", lag=100, variables_too=variables).stdout
    facts = [json.loads(line.removeprefix("FACT ")) for line in output.splitlines() if line.startswith("FACT ")]
    assert facts and {fact["on"] for fact in facts} == {"a simulated card"}
    for key in ("bitwise", "same_on_all_ranks", "close", "equal"):
        assert all(fact.get(key, True) for fact in facts), facts
    assert all("bitwise" in fact or "close" in fact or "equal" in fact for fact in facts), facts


def test_what_ranks_send_pickled_comes_to_the_receivers_gpu(rehearse):
    result = rehearse("objects", lag=100)
    assert result.values("told") == [[f"cuda:{rank}", [2.0, 2.0], "cpu"] for rank in range(2)]
    assert result.values("finite") == [True, True] and result.values("unlike rank 0") == [0, 0]
    assert max(result.values("unlike a sharded one")) < 1e-6
