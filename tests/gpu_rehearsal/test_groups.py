import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]


@pytest.mark.ranks(4, 5)
def test_groups_have_communicators_of_their_own(rehearse, ranks):
    result = rehearse("groups", ranks=ranks, lag=100)
    for rank, found in result.reports.items():
        of_mine = "group of ranks " + ", ".join(map(str, range(rank % 2, ranks, 2)))
        assert {"ring on GPUs", f"{of_mine} on GPUs"} <= set(found["in use"])
        assert {"gradients", f"gradients 2 of {of_mine}"} <= set(found["in training"])
        assert found["at the end"] == ["ring on GPUs"]
        assert found["equal"] == [True, True] and found["sharded"]
        assert found["unlike one process"] < 1e-5
