import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]
RUNS = [
    *("mlp:float32", "mlp:bfloat16", "transformer:float32", "transformer:autocast", "cnn:float32"),
    *("mlp:scaled", "mlp:accumulated", "mlp:compressed"),
]


@pytest.mark.ranks(2, 4)
def test_weights_equal_ddps(rehearse, ranks):
    result = rehearse("equals_ddp", *RUNS, ranks=ranks, lag=200)
    for run in RUNS:
        for found in result.values(run):
            assert found["finite"] and found["moved"], (run, found)
            assert not found["unlike DDP"] and not found["unlike rank 0"], (run, found)


@pytest.mark.parametrize(("size", "nodes"), [(8, ""), (8, "2"), (4, "1,3")])
def test_weights_equal_ddps_on_many_ranks_and_on_two_hosts(rehearse, size, nodes):
    variables = {"TEST_STEPS": "8", "RING_VIRTUAL_NODES": nodes}
    runs = ("mlp:float32", "mlp:bfloat16", "transformer:float32")
    launcher = "torchrun" if nodes else "spawned"
    result = rehearse("equals_ddp", *runs, ranks=size, launcher=launcher, lag=200, variables_too=variables)
    for found in (one for run in runs for one in result.values(run)):
        assert found["finite"] and found["moved"], found
        assert not found["unlike DDP"] and not found["unlike rank 0"], found


@pytest.mark.ranks(2, 3)
def test_replayed_graphs_train_to_the_bits_of_ddps(rehearse, ranks):
    models = ("mlp", "transformer")
    result = rehearse("captured", *models, ranks=ranks, lag=100)
    for found in (one for model in models for one in result.values(model)):
        assert found["finite"] and found["moved"], found
        assert not found["unlike ordinary steps"] and not found["unlike DDP"] and not found["unlike rank 0"], found


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("first", "is the first operation, and a CUDA graph is being captured. Run a few ordinary steps before"),
        (
            "continue",
            "cannot be repeated without one: capture no graph with collectives in it, or leave out on_failure",
        ),
        ("missing", "has no gradient"),
    ],
)
def test_what_no_graph_can_hold_is_rejected(rehearse, case, text):
    texts = rehearse("captured_wrongly", case).values("error")
    assert len(texts) == 2 and all(text in one for one in texts), texts


def test_a_rank_alone_that_replays_a_graph_is_told(rehearse):
    """The other one would wait for it on the host, where a graph compares nothing."""
    result = rehearse("captured_wrongly", "alone", check=False)
    assert "Capture and replay at the same steps on all ranks, or on none" in result.reports[0]["error"], result
    assert "rank 1 ends because rank 0 failed" in result.output or "rank 0" in result.reports[1]["error"], result


def test_ddp_over_the_ring_process_group(rehearse):
    result = rehearse("ring_group", lag=200)
    assert result.values("unlike DDP") == [0, 0]
    assert result.values("unlike rank 0") == [0, 0]
    assert result.values("on another stream") == [6, 6]
    assert result.values("asynchronous") == [[2] * 5] * 2


def test_lightning_on_two_devices(rehearse):
    result = rehearse("lightning_fit", lag=100)
    assert result.values("sum")[0] == result.values("sum")[1]
    assert result.values("finite") == [True, True] and result.values("steps") == [8, 8]
    assert result.values("device") == ["cuda:0", "cuda:1"]
    assert result.values("unlike a sharded one") == [0.0, 0.0]
    assert result.values("mixed") == [[True, True]] * 2
    for plain, sharded in result.values("Fabric"):
        assert plain == sharded == result.values("Fabric")[0][0]


def test_fsdp2_over_the_ring_process_group(rehearse):
    result = rehearse("fully_sharded", lag=100)
    assert result.values("finite") == result.values("moved") == [True, True]
    assert result.values("unlike nccl") == result.values("unlike rank 0") == [0, 0]
