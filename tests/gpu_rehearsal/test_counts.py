import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]


def test_a_step_asks_no_more_of_cuda_and_nccl_than_one_of_ddp(rehearse):
    result = rehearse("counts")
    for ours, theirs in zip(result.values("ours"), result.values("DDP"), strict=True):
        for what in ("NCCL calls", "NCCL groups", "torch's operators", "events recorded", "stream waits"):
            assert ours[what] <= theirs[what], (what, ours, theirs)
        assert ours["bytes to NCCL"] - theirs["bytes to NCCL"] < 1000  # which gradients there are, and what ranks tell
        # Now and then the ranks compare their weights, for which the host waits once; not once for each parameter.
        assert ours["host waits"] < 1
        assert ours["peak MB of the step"] <= 1.01 * theirs["peak MB of the step"]
