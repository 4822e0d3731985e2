import pytest

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


def test_a_process_takes_the_place_of_a_killed_rank_on_its_gpu(rehearse):
    result = rehearse("replaces", "1:backward:2", check=False, lag=100)
    assert sorted(result.values("is new")) == [False, True], result
    assert result.values("size") == [2, 2] and result.values("finite") == [True, True]
    assert result.values("unlike rank 0") == [0, 0] and min(result.values("taken")) >= 5


@pytest.mark.parametrize("program", ["lightning_heals", "keras_heals"])
def test_a_fit_goes_on_with_each_rank_on_its_gpu(rehearse, program):
    result = rehearse(program, "forward", ranks=3, check=False)
    assert result.values("size") == [2, 2] and result.values("finite") == [True, True], result
    assert result.values("unlike rank 0") == [0, 0]
    devices = ["cuda:0", "cuda:2"] if program == "lightning_heals" else ["cuda", "cuda"]
    assert result.values("device") == devices and min(result.values("launches") or [1])


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
