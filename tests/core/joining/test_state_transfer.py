import os
import signal
import threading
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import ArgumentError, PeerFailed
from ring_plugins.core.joining import state_transfer


@pytest.fixture(autouse=True)
def world(monkeypatch):
    found = SimpleNamespace(world_rank=3, elastic=SimpleNamespace(changes=SimpleNamespace(untold=[])))
    monkeypatch.setattr(state_transfer, "current", lambda: found)
    monkeypatch.setattr(state_transfer, "_untold_changes", lambda: ["a loss"])
    monkeypatch.setattr(state_transfer, "_hear_of", found.elastic.changes.untold.extend)
    return found


@pytest.mark.parametrize("error", [ValueError("does not fit"), SystemExit(3)])
def test_an_error_ends_a_process_that_takes_over_as_if_it_were_killed(error, capfd):
    if (child := os.fork()) == 0:
        try:
            with state_transfer.fails_alone():
                raise error
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    said = capfd.readouterr().err
    assert f"rank 3 (process {child}) has joined, but cannot take over the state of the training." in said
    assert f"{type(error).__name__}: {error}" in said


@pytest.mark.parametrize("error", [PeerFailed("rank 1 failed.", 1), KeyboardInterrupt()])
def test_the_failure_of_another_rank_is_raised_as_ever(error):
    with pytest.raises(type(error)), state_transfer.fails_alone():
        raise error


class Rank:
    """One of the ranks 1, 2 and 3 of a job, of which rank 3 has just joined; rank 1 gives."""

    ranks = (1, 2, 3)

    def __init__(self, rank, told):
        self.rank, self._told = rank, told

    def broadcast_object(self, item, root, purpose=""):
        assert (item is None) == (self.rank != root) and root == 0
        self._told += [item] if self.rank == root else []
        return self._told[0]


class Unloadable:
    def __reduce__(self):
        return _load, ()


def _load():
    raise KeyError("cannot be loaded")


def transfer_state(state):
    """What each rank gets, or the error that it raises, and the arguments of every `send`."""
    told, sent, found = [], [], []
    for rank in range(3):
        try:
            found.append(
                state_transfer.transfer_state(
                    state, [3], lambda needed, root: sent.append((needed, root())), Rank(rank, told)
                )
            )
        except Exception as error:
            found.append(error)
    return found, sent


def test_only_the_one_that_has_joined_gets_the_state_and_unpickles_it(world):
    found, sent = transfer_state(lambda: ("shapes", {"epoch": 2}))
    assert found == [None, None, {"epoch": 2}] and sent == [("shapes", 0)] * 3
    assert world.elastic.changes.untold == ["a loss"]
    (first, second, error), _ = transfer_state(lambda: (None, Unloadable()))
    assert first is second is None and isinstance(error, KeyError)


def test_a_state_that_cannot_be_made_or_pickled_is_an_error_of_the_one_that_has_joined(caplog):
    for state in (lambda: 1 / 0, lambda: (None, threading.Lock())):
        (first, second, error), sent = transfer_state(state)
        assert first is second is None and sent == []
        assert isinstance(error, ArgumentError) and "could not give the state of the training" in str(error)
    assert "rank 3 could not give the state of the training (ZeroDivisionError: division by zero), so" in caplog.text


def test_values_that_cannot_be_pickled_are_rejected_by_name():
    state_transfer.check_picklable({"epoch": 0, "seen": [1]})
    with pytest.raises(ArgumentError, match=r"TrainingState\(lock=...\): a lock cannot be pickled"):
        state_transfer.check_picklable({"epoch": 0, "lock": threading.Lock()})


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
        monkeypatch.setattr(state_transfer, "current", lambda: world)

    return be


def test_the_root_has_another_number_once_a_lower_rank_is_lost(be):
    be(3, [0, 1, 2, 3])
    source = state_transfer.Root(2)
    assert source.rank_in(Group(0, 1, 2, 3)) == 2
    assert source.rank_in(Group(0, 2, 3)) == 1
    be(3, [0, 2, 3])
    assert state_transfer.Root(2).rank_in(Group(0, 2, 3)) == 2  # the numbers of the script are those of now


def test_it_is_here_in_one_process_only(be):
    found = []
    for world_rank in (0, 1, 2):
        be(world_rank, [0, 1, 2])
        found.append(state_transfer.Root(1).is_here())
    assert found == [False, True, False]


def test_the_lowest_that_is_left_follows_a_lost_root(be):
    be(1, [0, 1, 2])
    source = state_transfer.Root(0)
    assert not source.is_here()
    be(1, [1, 2])
    assert source.is_here() and source.rank_in(Group(1, 2)) == 0


def test_a_joiner_is_no_root_before_it_has_joined(be):
    be(3, [0, 1, 2, 3], True)
    source = state_transfer.Root(3)
    assert not source.is_here()
    be(3, [0, 1, 2, 3])
    assert source.rank_in(Group(0, 1, 2, 3)) == 0
