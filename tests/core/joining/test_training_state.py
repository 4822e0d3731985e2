"""What the frameworks' states of a training share: names, and where processes join."""

import threading

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.joining import training_state
from ring_plugins.core.joining.training_state import ListedState


class Elastic:
    """Processes that wait to join: some may anywhere, and others only where the job may grow."""

    def __init__(self):
        self.is_pending, self.pending, self.told = False, False, 0

    def tell_changes(self):
        self.told += 1


class World:
    replaces = True

    def __init__(self):
        self.elastic, self.count = Elastic(), 7

    def operations(self):
        return self.count


class State(ListedState):
    def __init__(self, **values):
        super().__init__(values, list(values))
        self.shared = []

    def _described(self):
        return "some values"

    def _share(self, joined):
        self.shared.append(joined)


@pytest.fixture
def world(monkeypatch):
    found = World()
    monkeypatch.setattr(training_state, "current", lambda: found)
    monkeypatch.setattr(training_state, "join", lambda place, until: (place, until))
    monkeypatch.setattr(training_state, "admit", lambda place, added: (3,))
    return found


@pytest.mark.parametrize("name", ["_share", "_epoch"])
def test_a_name_that_is_taken_is_rejected(world, name):
    with pytest.raises(ArgumentError, match=f"TrainingState\\({name}=...\\): choose another name"):
        State(**{name: 1})


def test_what_cannot_be_pickled_is_rejected_where_the_state_is_made(world):
    with pytest.raises(ArgumentError, match="lock cannot be pickled"):
        State(lock=threading.Lock())
    world.replaces = False
    State(lock=threading.Lock())


def test_values_become_attributes_and_integers_say_where_a_rank_is(world):
    state = State(epoch=3, name="a")
    assert (state.epoch, state.name) == (3, "a")
    assert state._integers_of(["epoch", "name"]) == {"epoch": 3}


def test_a_process_that_joins_names_the_same_state_and_skips_the_place_at_which_it_joined(world):
    State()
    state = State()
    state._join("commit")
    assert state.shared == [
        (f"TrainingState {state._number} of {ListedState._made} made so far, of some values", "commit")
    ]
    assert world.elastic.told == 1 and state._is_where_it_joined()
    world.count += 1
    assert not state._is_where_it_joined()


@pytest.mark.parametrize(
    ("is_pending", "added", "joins"), [(False, False, False), (False, True, True), (True, False, True)]
)
def test_processes_by_which_the_job_grows_join_only_where_it_may(world, is_pending, added, joins):
    world.elastic.is_pending, world.elastic.pending = is_pending, True
    state = State()
    assert state._let_join(added) == joins
    assert state.shared == [(3,)] * joins and world.elastic.told == joins
