"""A root of several broadcasts stays one process while ranks are renumbered."""

import pytest

from ring_plugins.core.joining import root


class World:
    def __init__(self, world_rank, world_ranks, is_joining=False):
        self.world_rank, self.world_ranks, self.is_joining = world_rank, world_ranks, is_joining


class Group:
    def __init__(self, *ranks):
        self.ranks = ranks


@pytest.fixture(name="be")
def _be(monkeypatch):
    """Be another rank, or in another view."""

    def be(*state):
        world = World(*state)
        monkeypatch.setattr(root, "current", lambda: world)

    return be


def test_the_root_has_another_number_once_a_lower_rank_is_lost(be):
    be(3, [0, 1, 2, 3])
    source = root.Root(2)
    assert source.rank_in(Group(0, 1, 2, 3)) == 2
    assert source.rank_in(Group(0, 2, 3)) == 1
    be(3, [0, 2, 3])
    assert root.Root(2).rank_in(Group(0, 2, 3)) == 2  # the numbers of the script are those of now


def test_it_is_here_in_one_process_only(be):
    found = []
    for world_rank in (0, 1, 2):
        be(world_rank, [0, 1, 2])
        found.append(root.Root(1).is_here())
    assert found == [False, True, False]


def test_the_lowest_that_is_left_follows_a_lost_root(be):
    be(1, [0, 1, 2])
    source = root.Root(0)
    assert not source.is_here()
    be(1, [1, 2])
    assert source.is_here() and source.rank_in(Group(1, 2)) == 0


def test_a_joiner_is_no_root_before_it_has_joined(be):
    be(3, [0, 1, 2, 3], True)
    source = root.Root(3)
    assert not source.is_here()
    be(3, [0, 1, 2, 3])
    assert source.rank_in(Group(0, 1, 2, 3)) == 0
