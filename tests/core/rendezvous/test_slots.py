"""Slots, as `ring run` and the processes of a job see them in shared memory."""

import os

import numpy as np
import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.member import Member
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous import slots as slots_module
from ring_plugins.core.rendezvous.slots import FOLLOWED, HOPELESS, STARTED, OwnSlot, Slots, State, is_there, own_slot


@pytest.fixture
def all_live(monkeypatch):
    """No process of these tests has a segment."""
    monkeypatch.setattr(slots_module, "is_there", lambda owner: True)


@pytest.mark.usefixtures("all_live")
def test_a_slot_passes_from_its_first_process_to_one_that_waits_and_joins():
    slots = Slots(np.zeros(Slots.nbytes(3), np.uint8))
    first, second = Member(1, 1, liveness=(100, 5, 4096)), Member(3, 1, liveness=(200, 6, 4096))
    assert slots.state(1) == State.EMPTY and not slots.has_joined(1, 1)
    assert slots.number == 3 and slots.in_use == 0 and slots.is_new(1)
    slots.take(first, as_member=True)
    slots.take(Member(2, 2, liveness=(102, 5, 4096)), as_member=True)
    assert slots.members() == [first, Member(2, 2, liveness=(102, 5, 4096))]
    assert slots.state(1) != State.EMPTY and slots.has_joined(1, 1) and not slots.has_waiting()
    slots.in_use = 3
    slots.clear(1)
    assert slots.in_use == 3 and not slots.is_new(1) and slots.is_new(0)
    assert slots.state(1) == State.EMPTY and not slots.has_joined(1, 1)
    slots.take(second, as_member=False)
    assert slots.has_waiting() and slots.waiting() == [second]
    assert not slots.has_joined(1, 3) and slots.members() == [Member(2, 2, liveness=(102, 5, 4096))]
    slots.take(second, as_member=True)
    assert slots.has_joined(1, 3) and not slots.has_joined(1, 1) and not slots.has_waiting()
    slots.take(Member(4, 0, liveness=(300, 6, 4096)), as_member=False)
    assert slots.is_new(0) and slots.size_until_joined(0) == 3 and slots.size_until_joined(1) == 2
    slots.clear(0)
    OwnSlot(slots.memory, 1).note(State.LEFT)
    assert slots.state(1) == State.LEFT and slots.has_joined(1, 3) and second not in slots.members()


@pytest.mark.usefixtures("all_live")
def test_a_member_that_the_others_have_lost_is_one_no_more_but_one_that_left_or_was_followed_stays_what_it_is():
    slots = Slots(np.zeros(Slots.nbytes(3), np.uint8))
    for rank in range(3):
        slots.take(Member(rank, rank, liveness=(100 + rank, 5, 4096)), as_member=True)
    OwnSlot(slots.memory, 0).note(State.LEFT)
    slots.take(Member(7, 2, liveness=(107, 5, 4096)), as_member=False)
    for rank in range(3):
        slots.note_lost(rank)
    assert slots.state(1) == State.LOST not in (slots.state(0), slots.state(2))
    assert slots.has_joined(1, 1) and slots.state(1) in STARTED and slots.state(0) == State.LEFT and slots.has_waiting()
    assert not slots.members()
    slots.clear(1)
    assert slots.state(1) != State.LOST


def test_a_process_died_silently_if_it_was_a_member_and_has_told_nobody_that_it_ends():
    slots = Slots(np.zeros(Slots.nbytes(2), np.uint8))
    assert not slots.died_silently(0)  # it never was a member
    slots.take(Member(0, 0, liveness=(1, 2, 3)), as_member=True)
    assert slots.died_silently(0)
    slots.note_lost(0)
    assert slots.died_silently(0)
    OwnSlot(slots.memory, 0).note_end()
    assert not slots.died_silently(0) and not slots.is_hopeless(0) and not slots.has_followed(0)
    OwnSlot(slots.memory, 0).note_end(FOLLOWED)
    OwnSlot(slots.memory, 0).note_end()  # as it leaves then
    assert not slots.died_silently(0) and not slots.is_hopeless(0) and slots.has_followed(0)
    slots.clear(0)
    slots.take(Member(2, 0, liveness=(1, 2, 3)), as_member=False)
    OwnSlot(slots.memory, 0).note_end(HOPELESS)
    assert slots.is_hopeless(0) and not slots.died_silently(0)
    slots.clear(0)  # for the next process
    assert not slots.is_hopeless(0)


def test_a_standby_waits_until_it_gets_a_slot():
    slots = Slots(np.zeros(Slots.nbytes(2), np.uint8))
    assert not slots.has_come(4)
    slots.wait_as_standby(4)
    assert slots.has_come(4) and slots.given(4) is None and not slots.has_come(3)
    slots.give(0, 4)
    assert slots.given(4) == 0 and slots.has_come(4) and slots.state(0) == State.EMPTY
    slots.give(1, 3)  # before it has come
    assert not slots.has_come(3)
    slots.wait_as_standby(3)
    assert slots.given(3) == 1 and slots.has_come(3)


def test_a_process_is_there_as_long_as_it_has_its_segment():
    segment = Segment.create(10)
    owner = Member(0, 0, liveness=segment.address)
    assert is_there(owner)
    segment.close_file()
    assert not is_there(owner)


def test_a_rank_tells_its_hosts_supervisor_how_far_it_is(monkeypatch):
    segment = Segment.create(Slots.nbytes(2))
    slots = Slots(segment.array)
    variables = Slots.environment(segment, 2, 1)
    own_slot.cache_clear()
    monkeypatch.setenv("RING_SLOT", variables["RING_SLOT"])
    assert own_slot() is None, "a child of the rank that is a job of its own"
    own_slot.cache_clear()
    monkeypatch.setenv("RING_LAUNCHER", "rendezvous")
    own = OwnSlot.inherited(f"{os.dup(segment.fd)}:2:1")
    own.note(State.STARTING)
    assert slots.state(1) == State.STARTING and slots.state(1) not in STARTED
    with pytest.raises(LaunchError, match="no rank of this host has been a member"):
        own.read_join_info()
    own.join_info.write({"address": "10.1.0.2"})
    assert own.read_join_info() == {"address": "10.1.0.2"}
    own.take_part(Member(5, liveness=segment.address))
    assert own.members() == [Member(5, 1, liveness=segment.address)] and not own.has_waiting()
    assert slots.state(1) == State.MEMBER
    own.note(State.EXCLUDED)
    assert slots.state(1) == State.EXCLUDED and State.EXCLUDED in STARTED and slots.state(0) not in STARTED
    assert own.remote_joiners() == [] and not own.has_waiting() and not own.others_let_join
    slots.tell_of_remote_joiners([Member(9, 4)])
    slots.others_let_join = True
    assert own.remote_joiners() == [Member(9, 4)] and own.has_waiting() and own.others_let_join
    slots.tell_of_remote_joiners([])
    assert own.remote_joiners() == [] and not own.has_waiting()
    monkeypatch.setenv("RING_SLOT", "999:2:1")
    with pytest.raises(LaunchError, match="copied from a rank of a job into another environment"):
        own_slot()
    own_slot.cache_clear()
