"""Seats, as `ring run` and the processes of a job see them in shared memory."""

import numpy as np

from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous.seats import ROW, Occupant, Seats


def test_a_seat_passes_from_its_first_process_to_one_that_waits_and_joins():
    seats = Seats(np.zeros(3 * ROW, np.uint8))
    first, second = Occupant(1, 1, (100, 5, 4096)), Occupant(1, 3, (200, 6, 4096))
    assert not seats.is_taken(1) and not seats.has_joined(1, 1)
    seats.take(first, as_member=True)
    seats.take(Occupant(2, 2, (102, 5, 4096)), as_member=True)
    assert seats.members() == [first, Occupant(2, 2, (102, 5, 4096))]
    assert seats.is_taken(1) and seats.has_joined(1, 1) and not seats.has_waiting()
    seats.clear(1)
    assert not seats.is_taken(1) and not seats.has_joined(1, 1)
    seats.take(second, as_member=False)
    assert seats.has_waiting() and seats.waiting() == [second]
    assert not seats.has_joined(1, 3) and seats.members() == [Occupant(2, 2, (102, 5, 4096))]
    seats.take(second, as_member=True)
    assert seats.has_joined(1, 3) and not seats.has_joined(1, 1) and not seats.has_waiting()
    seats.leave(1)
    assert seats.has_left(1) and seats.has_joined(1, 3) and second not in seats.members()


def test_a_process_is_there_as_long_as_it_has_its_segment():
    segment = Segment.create(10)
    occupant = Occupant(0, 0, segment.address)
    assert occupant.is_there()
    segment.close_file()
    assert not occupant.is_there()
