"""A connected job, of one rank: how it ends."""

import os

import pytest

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.job import World
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.rendezvous import Rendezvous, launcher_of

ENDS = FailurePolicy(False, 0)


@pytest.fixture
def single():
    """A world of one rank, and a list that grows when its rendezvous closes."""
    closed = []
    rendezvous = Rendezvous(0, 1, lambda item: [item], None, close=lambda: closed.append(1))
    made = World(rendezvous, launcher_of(1), ENDS)
    yield made, closed
    made.close()


def test_a_forked_child_leaves_the_parents_job_alone(single):
    made, closed = single
    child = os.fork()
    if not child:
        made.close()
        os._exit(len(closed))
    assert os.waitpid(child, 0)[1] == 0


def test_it_closes_once(single):
    made, closed = single
    made.close()
    made.close()
    assert closed == [1]


def test_a_rank_that_could_not_be_built_closes_what_is_open():
    closed = []

    def gather(item):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        World(Rendezvous(0, 1, gather, None, close=lambda: closed.append(1)), launcher_of(1), ENDS)
    assert closed == [1]


def test_the_exit_status_is_that_of_what_ended_the_job(single):
    made, _ = single
    found = [
        made.status_after(error) for error in (SystemExit(3), KeyboardInterrupt(), ValueError(), PeerFailed("", 1))
    ]
    assert found == [3, 130, 1, 1]
