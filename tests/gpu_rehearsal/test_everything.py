"""What has checks of its own in tests/, on GPUs."""

import json
import re

import pytest

from tests.gpu_rehearsal.build import REPOSITORY
from tests.keras.backends import test_jax_device, test_tensorflow_device
from tests.torch import checks_process_group

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]
#: Checks of what is not simulated: sparse tensors, and the layouts that a compiled convolution expects of a card's.
NOT_SIMULATED = {
    "compiled_model",
    "embeddings_that_become_sparse_later_or_on_some_ranks_only",
    "sparse_gradient_on_one_rank_only",
    "sparse_gradients_and_tuning_do_not_wait_for_the_order_of_averagers",
    "sparse_gradients_gathered_or_densified",
}
# Checks of what registered memory must not change. Large gradients live in it, so they do not stay where they are.
UNCHANGED_BY_REGISTERED_MEMORY = (
    "equals_one_process_on_the_concatenated_batch",
    "tuned_buckets_change_between_steps_and_results_do_not",
    "unused_parameters",
    "gradients_in_sixteen_bits",
    "averagers_that_were_dropped_leave_nothing_behind",
)


def names_in(checks, decorators):
    return re.findall(rf"@{decorators}\ndef (\w+)", checks.read_text())


@pytest.mark.parametrize(
    ("size", "only", "registered"),
    [
        (2, (), ""),
        (3, ("equals_one_process_on_the_concatenated_batch",), ""),
        (2, UNCHANGED_BY_REGISTERED_MEMORY, "1"),
    ],
)
def test_gradients(rehearse, size, only, registered):
    checks = REPOSITORY / "tests" / "torch" / "checks_gradients.py"
    names = only or [name for name in names_in(checks, r"check\w*") if name not in NOT_SIMULATED]
    variables = {"TEST_DEVICE": "cuda", "TEST_ONLY": ",".join(names), "RING_NCCL_REGISTER": registered}
    found = rehearse(checks, ranks=size, lag=100, variables_too=variables)
    assert {name: found.values(name) for name in names} == {name: ["ok"] * size for name in names}
    assert all(launched > 10 for launched in found.values("launched by NCCL"))


def test_process_group(rehearse):
    script = REPOSITORY / "tests" / "torch" / "checks_process_group.py"
    found = rehearse(script, lag=100, variables_too={"TEST_DEVICE": "cuda", "TEST_SPAWN": "1"})
    done = [
        check.__name__ for check in checks_process_group.CHECKS if checks_process_group.is_done(check, 2, False, True)
    ]
    assert {name: found.values(name) for name in done} == {name: ["ok"] * 2 for name in done}
    assert all(launched > 100 for launched in found.values("launched by NCCL"))


@pytest.mark.parametrize(
    ("framework", "names"),
    [
        (test_tensorflow_device, ("plain", "two steps", "XLA", "uneven", "uneven XLA")),
        (test_jax_device, ("compiled", "eager", "accumulated", "uneven")),
    ],
)
def test_frameworks_whose_buffers_nccl_reduces(variables, framework, names):
    """Their CPU builds: their memory passes for that of a GPU, and they have no streams."""
    libraries = {name: variables[name] for name in ("LD_LIBRARY_PATH", "RING_NCCL_LIBRARY")}
    result = framework.check_equality(**libraries, RING_SIMULATED_HOST_MEMORY="1", CUDA_VISIBLE_DEVICES="0,1")
    calls = {"accumulated": 4 * 3, "uneven": 5 * 3, "uneven XLA": 5 * 3}
    assert [result.values(f"{name} by NCCL") for name in names] == [[calls.get(name, 8 * 3)] * 2 for name in names]


@pytest.mark.ranks(2, 3)
def test_sharded_optimizers(rehearse, ranks):
    checks = REPOSITORY / "tests" / "torch" / "checks_sharded_optimizer.py"
    found = rehearse(checks, ranks=ranks, lag=100, variables_too={"TEST_DEVICE": "cuda"})
    for name in names_in(checks, r"check\w*"):
        assert found.values(name) == ["ok"] * ranks, name


@pytest.mark.parametrize(
    "program",
    [
        *("equals_ddp", "equals_ddp registered", "lightning_fit", "two_streams", "keras_on_torch", "graph_at_exit"),
        *("killed_peer", "host_cost", "compiled_models"),
    ],
)
def test_programs_of_the_day_with_a_card(rehearse, program):
    """tests/gpu/run.sh runs them on a card."""
    name, _, registered = program.partition(" ")
    variables = {"RING_NCCL_REGISTER": str(int(bool(registered)))}
    script, ends = REPOSITORY / "tests" / "gpu" / f"{name}.py", name != "killed_peer"
    output = rehearse(script, lag=100, variables_too=variables, check=ends).stdout
    facts = [json.loads(line.removeprefix("FACT ")) for line in output.splitlines() if line.startswith("FACT ")]
    assert facts and {fact["on"] for fact in facts} == {"a simulated card"}
    for key in ("bitwise", "same_on_all_ranks", "close", "equal"):
        assert all(fact.get(key, True) for fact in facts), facts
    assert ends or "rank 1" in facts[0]["said"], facts


def test_what_ranks_send_pickled_comes_to_the_receivers_gpu(rehearse):
    result = rehearse("objects", lag=100)
    assert result.values("told") == [[f"cuda:{rank}", [2.0, 2.0], "cpu"] for rank in range(2)]
    assert result.values("finite") == [True, True] and result.values("unlike rank 0") == [0, 0]
    assert max(result.values("unlike a sharded one")) < 1e-6
