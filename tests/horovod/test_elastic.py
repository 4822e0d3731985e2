"""A training function begins again with equal states on all ranks, once the ranks have changed."""

from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.joining import training_state
from ring_plugins.horovod import elastic
from ring_plugins.horovod.common.exceptions import HostsUpdatedInterrupt
from ring_plugins.horovod.elastic import ObjectState, State, run


class Job:
    """A job whose ranks change when a test says so; what this process does in it is noted."""

    def __init__(self, monkeypatch, is_joining=False):
        self.done = []
        self.elastic = SimpleNamespace(
            mesh=object(),
            view=0,
            wants_change=False,
            pending=frozenset(),
            is_pending=False,
            changes=SimpleNamespace(untold=[]),
            tell_changes=self.tell,
            change_members=self.change,
            averages=False,
        )
        self.replaces, self.is_joining, self.operations = False, is_joining, lambda: 0
        self.communicator = SimpleNamespace(all_reduce=lambda memory, op: self.done.append("exchange"))
        monkeypatch.setattr(elastic, "current", lambda: self)
        monkeypatch.setattr(training_state, "current", lambda: self)
        monkeypatch.setattr(elastic.settings, "tell_place", lambda: self.done.append("place"))
        monkeypatch.setattr(elastic.ring, "broadcast_object", lambda value, root: self.done.append("sync") or value)

    def tell(self):
        self.elastic.changes.untold = []
        self.done.append("tell")

    def change(self):
        self.elastic.wants_change = False
        self.done.append("change")


def test_after_a_change_the_function_begins_again_with_what_was_reached(monkeypatch):
    job = Job(monkeypatch)
    state = ObjectState(epoch=0, batch=0)
    state.register_reset_callbacks([lambda: job.done.append("reset")])
    began = []

    @run
    def train(state, more, *, last):
        """Train."""
        began.append((state.epoch, more))
        for epoch in range(state.epoch, last):
            state.epoch = epoch
            if state.epoch == 2 and len(began) == 1:
                job.elastic.view, job.elastic.wants_change, job.elastic.changes.untold = 1, True, [1]
            state.commit()
        return "trained"

    assert train(state, 7, last=4) == "trained" and train.__doc__ == "Train."
    assert began == [(0, 7), (2, 7)]
    before, after = ["sync", "exchange", "exchange", "exchange", "change", "tell"], ["exchange", "exchange"]
    assert job.done == [*before, "place", "reset", "sync", *after]


def test_a_process_that_joins_does_so_before_the_function_begins(monkeypatch):
    job = Job(monkeypatch, is_joining=True)

    def join(place, until):
        assert place == "TrainingState 1 of 1 made so far, of epoch"
        assert until == "call commit() of the state of hvd.elastic"
        job.is_joining, job.elastic.view = False, 5
        job.done.append("join")
        return (3,)

    monkeypatch.setattr(training_state, "join", join)
    monkeypatch.setattr(training_state.ListedState, "_made", 0)
    monkeypatch.setattr(elastic, "transfer_state", lambda state, joined, send: {"epoch": 4})
    state = ObjectState(epoch=0)
    state.register_reset_callbacks([lambda: job.done.append("reset")])
    assert run(lambda state: (state.epoch, state.commit()))(state) == (4, None)
    assert job.done == ["join", "tell", "place", "reset", "sync", "exchange"]


def test_a_commit_exchanges_nothing_where_passes_of_gradients_do(monkeypatch):
    job = Job(monkeypatch)
    job.elastic.averages = True
    ObjectState(epoch=0).commit()
    assert job.done == []


def test_a_job_whose_ranks_do_not_change_exchanges_nothing(monkeypatch):
    job = Job(monkeypatch)
    job.elastic.mesh = None
    state = ObjectState(epoch=0)
    state.commit()
    state.check_host_updates()
    assert job.done == []


def test_what_was_saved_can_be_restored_and_later_changes_do_not_reach_it(monkeypatch):
    Job(monkeypatch)
    state = ObjectState(None, None, best=[1])
    state.commit()
    with pytest.raises(ArgumentError, match=r"Call save\(\) where"):
        state.restore()
    for save in (state.save, state.sync):
        save()
        for _ in range(2):
            state.best.append(2)
            state.restore()
            assert state.best == [1]
    state.best.append(2)
    state.commit()  # the script is known to go back
    state.best.append(3)
    state.restore()
    assert state.best == [1, 2]


def test_a_state_s_own_reset_comes_before_the_callbacks(monkeypatch):
    job = Job(monkeypatch)

    class Own(State):
        def reset(self):
            job.done.append("own")

    state = Own(epoch=0)
    state.register_reset_callbacks([lambda: job.done.append("callback")])
    state.on_reset()
    assert job.done == ["place", "own", "callback"]


@pytest.mark.parametrize("arguments", [(), (3,)])
def test_a_function_without_a_state_is_rejected(arguments):
    with pytest.raises(ArgumentError, match=r"needs a state there, such as hvd\.elastic\.TorchState"):
        run(lambda *_: None)(*arguments)


def test_the_interrupt_is_horovod_s():
    assert HostsUpdatedInterrupt(True).skip_sync
