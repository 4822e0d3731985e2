"""Processes join a job on several hosts: where members find a loss there, and when a joiner gives up."""

from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.control.admission import NotAdmitted
from ring_plugins.core.elastic import joining_between_hosts

JOINER = (9, 1, (4711, 5, 100), "node", "host1", 4711, "host1", "127.0.0.1", 1)


@pytest.mark.parametrize(("waiting", "where"), [([], []), ([JOINER], ["here"])])
def test_a_loss_is_found_where_the_members_find_it_that_have_the_result(monkeypatch, waiting, where):
    """If nobody waits, they go on to their next operation: until then, all see the ranks from before."""
    found = []
    monkeypatch.setattr(joining_between_hosts, "_waiting_here", lambda world: [])
    elastic = SimpleNamespace(
        mesh=SimpleNamespace(pending=[2]), pending=frozenset(), agree_on_members=lambda: found.append("here")
    )
    processes = SimpleNamespace(shards=3, taken_slots={0, 2})
    communicator = SimpleNamespace(all_gather_object=lambda own, purpose: [own, waiting, []])
    world = SimpleNamespace(elastic=elastic, processes=processes, communicator=communicator)
    assert joining_between_hosts.admit(world, "here", lost=True, added=False) == ()
    assert found == where


def test_a_joiner_that_counts_as_lost_ends_since_it_could_never_join(monkeypatch):
    """Its supervisor starts another process then, which has another number."""

    def is_rejected(*_):
        raise NotAdmitted("it is lost")

    candidate = SimpleNamespace(is_lost=True, withdraw=lambda view: None)
    monkeypatch.setattr(joining_between_hosts, "Candidate", lambda rank, listener: candidate)
    monkeypatch.setattr(joining_between_hosts, "_wait_for_invitation", lambda *_: (1, {}))
    monkeypatch.setattr(joining_between_hosts, "_join_at", is_rejected)
    world = SimpleNamespace(
        world_rank=9,
        shard=(1, 3),
        own_slot=SimpleNamespace(wait_to_join=lambda rank, address: None),
        transport=SimpleNamespace(address="127.0.0.1", listener=SimpleNamespace(port=1)),
        local_peers=SimpleNamespace(own=SimpleNamespace(address=(1, 2, 3), announce=lambda text: None)),
        processes=SimpleNamespace(entries={9: SimpleNamespace(host="host1", domain="host1")}),
    )
    with pytest.raises(PeerFailed, match=r"this process \(process \d+ on host1\).* for 6 s, and count it"):
        joining_between_hosts.join(world, "here", "let it join")
