"""A rank's place among real and virtual hosts."""

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.topology import Topology, find_topology, virtual_nodes


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ((), ["h", "h", "h", "i"]),
        ((1,), ["h/0", "h/0", "h/0", "i/0"]),
    ],
)
def test_virtual_nodes_split_each_host(setting, expected):
    got = virtual_nodes(["h", "h", "h", "i"], setting)
    assert [key.replace("virtual", "") for key in got] == expected


@pytest.mark.parametrize(("setting", "sizes"), [((2,), [1, 2]), ((1, 2), [1, 2]), ((3,), [1, 1, 1]), ((2, 1), [2, 1])])
def test_virtual_nodes_of_one_host(setting, sizes):
    got = virtual_nodes(["h"] * 3, setting)
    assert [got.count(key) for key in dict.fromkeys(got)] == sizes


@pytest.mark.parametrize("setting", [(4,), (1, 1), (2, 2)])
def test_virtual_nodes_must_add_up_to_the_ranks(setting):
    with pytest.raises(LaunchError, match="RING_VIRTUAL_NODES="):
        virtual_nodes(["h"] * 3, setting)


def test_the_place_of_a_rank_among_hosts_that_do_not_follow_each_other():
    nodes, hosts = ["a", "b", "a", "b", "b"], ["host1", "host2", "host1", "host2", "host2"]
    assert find_topology(3, nodes, hosts) == Topology(3, 5, 1, 3, 1, 2, ("host1", "host2"))
    assert find_topology(2, nodes, hosts) == Topology(2, 5, 1, 2, 0, 2, ("host1", "host2"))


def test_the_size_of_a_job_reads_well():
    assert find_topology(0, ["a"], ["host1"]).summary == "1 rank on 1 host"
    assert find_topology(0, ["a", "b"], ["host1", "host2"]).summary == "2 ranks on 2 hosts"
