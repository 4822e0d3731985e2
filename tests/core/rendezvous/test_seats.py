"""Seats, as `ring run` and the processes of a job see them in shared memory."""

import os

import numpy as np
import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous.seats import FOLLOWED, HOPELESS, Occupant, OwnSeat, Seats, own_seat


def test_a_seat_passes_from_its_first_process_to_one_that_waits_and_joins():
    seats = Seats(np.zeros(Seats.nbytes(3), np.uint8))
    first, second = Occupant(1, 1, (100, 5, 4096)), Occupant(1, 3, (200, 6, 4096))
    assert not seats.is_taken(1) and not seats.has_joined(1, 1)
    assert seats.number == 3 and seats.in_use == 0 and seats.is_new(1)
    seats.take(first, as_member=True)
    seats.take(Occupant(2, 2, (102, 5, 4096)), as_member=True)
    assert seats.members() == [first, Occupant(2, 2, (102, 5, 4096))]
    assert seats.is_taken(1) and seats.has_joined(1, 1) and not seats.has_waiting()
    seats.in_use = 3
    seats.clear(1)
    assert seats.in_use == 3 and not seats.is_new(1) and seats.is_new(0)
    assert not seats.is_taken(1) and not seats.has_joined(1, 1)
    seats.take(second, as_member=False)
    assert seats.has_waiting() and seats.waiting() == [second]
    assert not seats.has_joined(1, 3) and seats.members() == [Occupant(2, 2, (102, 5, 4096))]
    seats.take(second, as_member=True)
    assert seats.has_joined(1, 3) and not seats.has_joined(1, 1) and not seats.has_waiting()
    seats.take(Occupant(0, 4, (300, 6, 4096)), as_member=False)
    assert seats.is_new(0) and seats.size_until_joined(0) == 3 and seats.size_until_joined(1) == 2
    seats.clear(0)
    seats.leave(1)
    assert seats.has_left(1) and seats.has_joined(1, 3) and second not in seats.members()


def test_a_member_that_the_others_have_lost_is_one_no_more_but_one_that_left_or_was_followed_stays_what_it_is():
    seats = Seats(np.zeros(Seats.nbytes(3), np.uint8))
    for rank in range(3):
        seats.take(Occupant(rank, rank, (100 + rank, 5, 4096)), as_member=True)
    seats.leave(0)
    seats.take(Occupant(2, 7, (107, 5, 4096)), as_member=False)
    for rank in range(3):
        seats.note_lost(rank)
    assert [seats.is_lost(seat) for seat in range(3)] == [False, True, False]
    assert seats.has_joined(1, 1) and seats.has_started(1) and seats.has_left(0) and seats.has_waiting()
    assert not seats.members()
    seats.clear(1)
    assert not seats.is_lost(1)


def test_a_process_died_silently_if_it_was_a_member_and_has_told_nobody_that_it_ends():
    seats = Seats(np.zeros(Seats.nbytes(2), np.uint8))
    assert not seats.died_silently(0)  # it never was a member
    seats.take(Occupant(0, 0, (1, 2, 3)), as_member=True)
    assert seats.died_silently(0)
    seats.note_lost(0)
    assert seats.died_silently(0)
    seats.note_end(0)
    assert not seats.died_silently(0) and not seats.is_hopeless(0) and not seats.has_followed(0)
    seats.note_end(0, FOLLOWED)
    seats.note_end(0)  # as it leaves then
    assert not seats.died_silently(0) and not seats.is_hopeless(0) and seats.has_followed(0)
    seats.clear(0)
    seats.take(Occupant(0, 2, (1, 2, 3)), as_member=False)
    seats.note_end(0, HOPELESS)
    assert seats.is_hopeless(0) and not seats.died_silently(0)
    seats.clear(0)  # for the next process
    assert not seats.is_hopeless(0)


def test_a_spare_waits_until_it_gets_a_seat():
    seats = Seats(np.zeros(Seats.nbytes(2), np.uint8))
    assert not seats.has_come(4)
    seats.wait_as_spare(4)
    assert seats.has_come(4) and seats.given(4) is None and not seats.has_come(3)
    seats.give(0, 4)
    assert seats.given(4) == 0 and seats.has_come(4) and not seats.is_taken(0)
    seats.give(1, 3)  # before it has come
    assert not seats.has_come(3)
    seats.wait_as_spare(3)
    assert seats.given(3) == 1 and seats.has_come(3)


def test_a_process_is_there_as_long_as_it_has_its_segment():
    segment = Segment.create(10)
    occupant = Occupant(0, 0, segment.address)
    assert occupant.is_there()
    segment.close_file()
    assert not occupant.is_there()


def test_a_rank_tells_its_hosts_supervisor_how_far_it_is(monkeypatch):
    segment = Segment.create(OwnSeat.nbytes(2))
    seats, (_, remote_newcomers) = OwnSeat.parts(segment.array)
    variables = OwnSeat.environment(segment, 2, 1)
    own_seat.cache_clear()
    monkeypatch.setenv("RING_SEAT", variables["RING_SEAT"])
    assert own_seat() is None, "a child of the rank that is a job of its own"
    own_seat.cache_clear()
    monkeypatch.setenv("RING_LAUNCHER", "rendezvous")
    own = OwnSeat(f"{os.dup(segment.fd)}:2:1")
    own.start()
    assert seats.is_starting(1) and not seats.has_started(1)
    with pytest.raises(LaunchError, match="no rank of this host has been a member"):
        own.read_join_info()
    own.write_join_info({"address": "10.1.0.2"})
    assert own.read_join_info() == {"address": "10.1.0.2"}
    own.take_part(5, segment.address)
    assert own.members() == [Occupant(1, 5, segment.address)] and not own.has_waiting()
    assert seats.has_started(1) and not seats.is_starting(1) and not seats.is_cut_off(1)
    own.note_cut_off()
    assert seats.has_started(1) and seats.is_cut_off(1) and not seats.has_started(0)
    assert own.remote_newcomers() == [] and not own.has_waiting() and not own.others_let_join
    remote_newcomers.write([{"seat": 4}])
    seats.num_remote_newcomers, seats.others_let_join = 1, True
    assert own.remote_newcomers() == [{"seat": 4}] and own.has_waiting() and own.others_let_join
    remote_newcomers.write([])
    seats.num_remote_newcomers = 0
    assert own.remote_newcomers() == [] and not own.has_waiting()
    monkeypatch.setenv("RING_SEAT", "999:2:1")
    with pytest.raises(LaunchError, match="copied from a rank of a job into another environment"):
        own_seat()
    own_seat.cache_clear()
