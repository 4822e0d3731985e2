"""What processes tell each other first, and what is found wrong in it."""

import json

import pytest

from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.members.introduction import Introduction, meet, own_member
from ring_plugins.core.members.policy import FailurePolicy

ENDS = FailurePolicy(False, 0)


def introduction(rank, policy=ENDS, **changed):
    member = own_member(rank, rank, None, None, False)._replace(**changed)
    return Introduction(member, None, False, list(policy), 0)


def met(*told):
    return meet(0, told[0], lambda own: json.loads(json.dumps(told)), None, False)


def test_all_know_who_is_where():
    told, members = met(introduction(0), introduction(1), introduction(2))
    assert [one.member.rank for one in told] == [0, 1, 2] == list(members.ranks)
    assert members.topology.num_nodes == 1 and all(one.node == one.domain for one in members.known.values())


def test_virtual_hosts_need_something_that_connects_them(monkeypatch):
    monkeypatch.setenv("RING_VIRTUAL_NODES", "2")
    with pytest.raises(LaunchError, match="RING_VIRTUAL_NODES needs a launcher that connects hosts"):
        met(introduction(0), introduction(1))


def test_a_job_that_is_to_go_on_after_losses_needs_memory_or_sockets():
    recovers = FailurePolicy(True, 1)
    with pytest.raises(ArgumentError, match="differ by rank"):
        met(introduction(0, recovers), introduction(1))
    with pytest.raises(ArgumentError, match="cannot share memory on their host"):
        met(introduction(0, recovers), introduction(1, recovers))
    liveness = 1, 2, 3
    assert met(introduction(0, recovers, liveness=liveness), introduction(1, recovers, liveness=liveness))
