"""`ring run --host-discovery-script`: a job moves over hosts as a script lists them."""

import sys

import pytest

from tests.hosts import hosts
from tests.launcher.test_discovery import ELASTIC, RING, stages


@pytest.fixture(scope="module")
def cluster():
    with hosts(3) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize(
    "lists",
    [
        [["host1:2", 2], ["host1:2,host2:2", 4], ["host1:2,host3:1", 3], ["host1:2,host2:1,host3:1", 4]],
        [["host2:2", 2], ["host2:1,host3:2", 3], ["host3:2", 2], ["host1:1,host3:3", 4]],  # rank 0 leaves, too
    ],
    ids=["grows and shrinks", "moves"],
)
def test_a_job_moves_over_hosts_as_the_script_lists_them(cluster, lists, tmp_path):
    env = stages(tmp_path / "list", *lists)
    options = ["--host-discovery-script", f"cat {tmp_path}/list", "--min-np", "2", "--max-np", "4", "--no-check"]
    exported = [word for name in env for word in ("-x", name)]
    result = cluster.start([RING, "run", *options, *exported, sys.executable], ELASTIC, lists[-1][1], env=env).run(120)
    assert result.returncode == 0, str(result)
    found = result.values("sizes")
    assert found == [found[0]] * lists[-1][1], str(result)
    assert found[0][0] == lists[0][1] and found[0][-1] == lists[-1][1]
    assert len({str(weights) for weights in result.values("weights")}) == 1
    assert "will leave: the slots are not listed any more." in result.output
