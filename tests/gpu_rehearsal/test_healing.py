import json

import pytest

from tests.keras import test_replacement as of_keras
from tests.launch import slowness
from tests.lightning import test_replacement as of_lightning

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]
#: Ranks, who dies where and when, and settings of the simulation.
JOBS = [
    (3, "1:backward:2", {}),
    (3, "0:end:2", {"peer_errors": 1}),
    (2, "1:after:1", {"lag": 200}),
    (3, "2:first:1 0:end:3", {"nccl": 22603}),  # without ncclCommShrink
    (4, "0:end:2 3:end:2", {}),
    (3, "1:forward:0 2:update:2", {"lag": 200}),
]


@pytest.mark.parametrize(("size", "faults", "settings"), JOBS)
def test_survivors_go_on_with_the_weights_of_a_replay(rehearse, size, faults, settings):
    result = rehearse("heals", *faults.split(), ranks=size, check=False, **settings)
    left = [rank for rank in range(size) if rank not in {int(fault[0]) for fault in faults.split()}]
    assert result.values("last") == [left] * len(left), result
    assert result.values("steps") == [6] * len(left)
    assert result.values("unlike rank 0") == result.values("unlike the replay") == [0] * len(left)


@pytest.mark.parametrize(("size", "faults"), [(2, "1:backward:2"), (3, "0:end:1 2:first:4")])
def test_processes_take_the_places_of_killed_ranks_on_their_gpus(rehearse, size, faults):
    variables = {"TEST_ON_FAILURE": "replace"}
    result = rehearse("heals", *faults.split(), ranks=size, check=False, lag=100, variables_too=variables)
    assert sum(result.values("is new")) == len(faults.split()) and result.values("size") == [size] * size, result
    assert result.values("last") == [[*range(size)]] * size and min(result.values("taken")) >= 5
    assert result.values("unlike rank 0") == result.values("unlike the replay") == [0] * size
    assert result.values("after join") == [size] * size, result


@pytest.mark.parametrize("death", [[0, 5, "now"], [2, 9, "now"], [1, 1, "in validation"]])
def test_processes_take_places_in_a_trainer_on_gpus(rehearse, tmp_path, death):
    told = {"TEST_DEATHS": json.dumps([death]), "TEST_ROOT": str(tmp_path), "TEST_PENDING": str(60 * slowness())}
    result = rehearse(of_lightning.CHECKS, ranks=3, lag=100, variables_too={**told, "TEST_ACCELERATOR": "gpu"})
    _, own = of_lightning.check(result)
    assert own[death[0]]["number"] == 3 and [one["device"] for one in own] == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_takes_a_place_in_keras_fit_on_its_gpu(rehearse, victim):
    told = {"TEST_DEATHS": json.dumps([[victim, 1, "now"]]), "TEST_PENDING": str(60 * slowness())}
    told |= {"KERAS_BACKEND": "torch", "TEST_ACCELERATOR": "gpu"}
    found, numbers = of_keras.check(rehearse(of_keras.CHECKS, ranks=3, lag=100, variables_too=told))
    assert numbers[victim] == 3 and found["history"][-1] == [0, 1, 2]


@pytest.mark.parametrize("program", ["lightning_heals", "keras_heals"])
def test_a_fit_goes_on_with_each_rank_on_its_gpu(rehearse, program):
    result = rehearse(program, "1:forward:3", ranks=3, check=False)
    assert result.values("size") == [2, 2] and result.values("finite") == [True, True], result
    assert result.values("unlike rank 0") == [0, 0]
    devices = ["cuda:0", "cuda:2"] if program == "lightning_heals" else ["cuda", "cuda"]
    assert result.values("device") == devices and min(result.values("launches") or [1])
    if program == "lightning_heals":
        assert result.values("then") == [[device, 12, True] for device in devices]
        assert result.values("then unlike rank 0") == [0, 0]


def test_what_cannot_go_on_after_a_loss_is_rejected_with_a_remedy(rehearse):
    result = rehearse("refused_to_heal")
    for case, what in (
        ("compressed", "compression of gradients between GPUs"),
        ("sharded", "a sharded optimizer, whose state is lost with a rank,"),
        ("grouped", "ring_plugins.Group, unless of all ranks in order,"),
        ("sparse", 'gathering sparse gradients (sparse="densify" works)'),
    ):
        texts = result.values(case)
        assert len(texts) == 2 and all(f"{what} does not support on_failure=" in text for text in texts), (case, texts)
        assert all("leave it out, and unset RING_ON_FAILURE" in text for text in texts), texts
    assert result.values("finite") == [True, True]


@pytest.mark.parametrize("case", ["compressed", "sharded"])
def test_all_ranks_hear_of_what_one_asks_for_alone(rehearse, case):
    texts = rehearse("refused_to_heal", "alone", case).values(case)
    assert len(texts) == 2 and "does not support on_failure=" in texts[1] and "rank 1" in texts[0], texts


def test_communicators_that_block_are_rejected_on_gpus_and_not_on_cpus(rehearse):
    result = rehearse("refused_to_heal", variables_too={"NCCL_COMM_BLOCKING": "1"})
    for text in result.values("compressed"):
        assert text.startswith('NCCL_COMM_BLOCKING=1 does not work with on_failure="continue"'), text
    assert result.values("finite") == [True, True]
