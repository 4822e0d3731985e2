"""Processes join a job on several hosts: where its members find a loss meanwhile."""

from types import SimpleNamespace

import pytest

from ring_plugins.core.elastic import joining_between_hosts

NEWCOMER = (9, 1, (4711, 5, 100), "node", "host1", 4711, "host1", "127.0.0.1", 1)


@pytest.mark.parametrize(("waiting", "where"), [([], []), ([NEWCOMER], ["here"])])
def test_a_loss_is_found_where_the_members_find_it_that_have_the_result(monkeypatch, waiting, where):
    """If nobody waits, they go on to their next operation: until then, all see the ranks from before."""
    found = []
    monkeypatch.setattr(joining_between_hosts, "_waiting_here", lambda world: [])
    elastic = SimpleNamespace(
        mesh=SimpleNamespace(pending=[2]), awaited=frozenset(), agree_on_members=lambda: found.append("here")
    )
    processes = SimpleNamespace(shares=3, taken_seats={0, 2})
    communicator = SimpleNamespace(all_gather_object=lambda own: [own, waiting, []])
    world = SimpleNamespace(elastic=elastic, processes=processes, communicator=communicator)
    assert joining_between_hosts.admit(world, "here", lost=True, further=False) == ()
    assert found == where
