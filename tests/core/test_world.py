import pytest

from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.rendezvous.topology import virtual_nodes
from ring_plugins.core.world import init


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("", ["h", "h", "h", "i"]),
        ("1", ["h/0", "h/0", "h/0", "i/0"]),
    ],
)
def test_virtual_nodes_split_each_host(setting, expected):
    got = virtual_nodes(["h", "h", "h", "i"], setting)
    assert [key.replace("virtual", "") for key in got] == expected


@pytest.mark.parametrize(("setting", "sizes"), [("2", [1, 2]), ("1,2", [1, 2]), ("3", [1, 1, 1]), ("2,1", [2, 1])])
def test_virtual_nodes_of_one_host(setting, sizes):
    got = virtual_nodes(["h"] * 3, setting)
    assert [got.count(key) for key in dict.fromkeys(got)] == sizes


@pytest.mark.parametrize("setting", ["4", "0", "1,1", "two", "2,2", "-1,4"])
def test_virtual_nodes_that_do_not_fit_are_refused(setting):
    with pytest.raises(LaunchError, match="RING_VIRTUAL_NODES="):
        virtual_nodes(["h"] * 3, setting)


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True])
def test_a_number_of_ranks_that_is_none_is_refused(number):
    with pytest.raises(ArgumentError, match="ranks="):
        init(ranks=number)
