"""Who the processes of a job are, and which of them are members now."""

import json

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.member import Cores, Member, Members, Topology, find_topology, virtual_nodes

CORES = Cores("kernel", "container", "0-3", None)


def member(rank, slot=None, node="a", **more):
    return Member(rank, rank if slot is None else slot, f"host {node}", 100 + rank, node, node, cores=CORES, **more)


def test_a_record_comes_back_as_it_was_from_a_message():
    one = member(3, liveness=(4, 5, 6), addresses=("10.0.0.1", "::1"))
    assert Member.read(json.loads(json.dumps(one))) == one


def test_members_are_in_the_order_of_slots_and_all_that_ever_were_stay_known():
    members = Members(1, [member(0), member(1), member(2, node="b")])
    assert members.ranks == (0, 1, 2) and members.topology.num_nodes == 2 and not members.is_near(2)
    members.follow([1, 2], 1)
    assert (members.view, members.topology.rank, members.topology.size, members.taken_slots) == (1, 0, 2, [1, 2])
    members.add([member(7, 0)])
    members.follow([1, 2, 7], 2)
    assert members.ranks == (7, 1, 2) and members.topology.rank == 1
    assert sorted(members.known) == [0, 1, 2, 7] and members.of_slot[0].rank == 7


def test_lost_ranks_can_be_replaced_where_members_are_left():
    members = Members(0, [member(0), member(1), member(2, node="b")])
    members.follow([0], 1)
    assert members.can_be_replaced([1]) and not members.can_be_replaced([1, 2])


def test_data_is_divided_anew_where_the_job_grows():
    members = Members(0, [member(0), member(1)])
    members.divide_among(3)
    assert (members.shards, members.past_shards) == (3, {2, 3})


def test_a_process_that_is_yet_to_join_looks_like_one_of_all_slots():
    told = json.loads(json.dumps(Members(0, [member(0), member(1), member(2, node="b")]).told_of_slots()))
    joiner = Members.before_joining(Member(9, 1, "host a", 109, "a", cores=CORES), told, 3)
    assert joiner.ranks == (9,) and not joiner.is_added
    assert (joiner.topology.rank, joiner.topology.size, joiner.topology.local_size) == (1, 3, 2)
    assert joiner.cores == (1, [CORES] * 3)
    joiner.add([member(0), member(2, node="b"), member(9, 1)])
    joiner.follow([0, 9, 2], 4)
    joiner.learn_of_slots(told)
    assert joiner.of_slot[1].rank == 9 and joiner.topology.rank == 1


def test_a_process_by_which_a_job_grows_is_on_its_own_host_until_it_has_joined():
    told = Members(0, [member(0), member(1)]).told_of_slots()
    here = Members.before_joining(Member(9, 3, "host a", 109, "a"), told, 4)
    assert here.is_added and (here.topology.size, here.topology.local_size) == (4, 4)
    new_host = Members.before_joining(Member(9, 2, "host c", 109, "c"), told, 3)
    assert new_host.is_added and (new_host.topology.num_nodes, new_host.topology.local_size) == (2, 1)


def test_a_slot_stays_on_a_virtual_host_of_this_one_and_else_comes_here():
    halves = [member(0, node="a")._replace(node="a/virtual0"), member(1, node="a")._replace(node="a/virtual1")]
    members = Members(0, [*halves, member(2, node="b")])
    assert [members.node_for(slot) for slot in (0, 1, 2, 3)] == ["a/virtual0", "a/virtual1", "a/virtual0", "a/virtual0"]


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
