"""What is seen of a training on GPUs."""

import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]


def test_skipped_steps_timeline_breakdown_and_stall_report(rehearse, tmp_path):
    watched = {"TEST_TRACES": str(tmp_path), "RING_STALL_WARNING": "1"}
    result = rehearse("observed", lag=100, variables_too=watched)
    for skipped in result.values("skipped"):
        ((number, reason),) = skipped
        assert number == 2 and reason.startswith("rank 1: OutOfMemoryError: CUDA out of memory")
    assert result.values("unlike rank 0") == [0, 0]
    assert result.reports[0]["on GPUs"][0] == [0, 1] and result.reports[0]["on GPUs"][2]
    stall = result.reports[0]["stall"]
    assert "rank 0 has been waiting" in stall and "all_reduce" in stall and "on the GPU" in stall, stall
    assert "missing: rank 1" in stall and "observed.py, line" in stall
    assert result.values("average") == [1.5, 1.5]
