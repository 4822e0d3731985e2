import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]
RUNS = ["mlp:float32", "mlp:bfloat16", "transformer:float32", "transformer:autocast", "cnn:float32"]


@pytest.mark.ranks(2, 4)
def test_weights_equal_ddps(rehearse, ranks):
    result = rehearse("equals_ddp", *RUNS, ranks=ranks, lag=200)
    for run in RUNS:
        for found in result.values(run):
            assert found["finite"] and found["moved"], (run, found)
            assert not found["unlike DDP"] and not found["unlike rank 0"], (run, found)
