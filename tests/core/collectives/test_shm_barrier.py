"""Barriers among threads that stand for the ranks of a host; pages are ordinary memory."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ring_plugins.core.base.errors import MismatchError, PeerFailed, RingError
from ring_plugins.core.collectives.fingerprint import fingerprint
from ring_plugins.core.collectives.shm_barrier import PAGE, SharedMemoryBarrier
from ring_plugins.core.control.wait import Wait

SIZE = 3
STEP = fingerprint("barrier")


@pytest.fixture
def members():
    pages = [np.zeros(PAGE, np.uint8) for _ in range(SIZE)]
    return [SharedMemoryBarrier(pages, range(SIZE), i, Wait("test", None), "test") for i in range(SIZE)]


@pytest.fixture
def on_all(members):
    """Call something with every member, each in its thread, and return the results or errors."""
    with ThreadPoolExecutor(SIZE) as threads:
        together = threading.Barrier(SIZE)

        def call(function, member):
            together.wait(60)
            try:
                return function(member)
            except Exception as error:
                return error

        yield lambda function: list(threads.map(lambda member: call(function, member), members, timeout=60))


def test_no_member_passes_before_all_have_arrived(members, on_all):
    arrived = []

    def arrive(member):
        late = members.index(member) == 1
        time.sleep(0.05 if late else 0)
        arrived.append(member)
        member.arrive(STEP)
        return len(arrived)

    assert on_all(arrive) == [SIZE] * SIZE


def test_members_that_saw_others_die_agree_on_who_is_lost(members):
    """Member 3 has died, and so does member 1 once it has agreed with what it knew: whoever looks then keeps it."""
    pages = [np.zeros(PAGE, np.uint8) for _ in range(5)]
    members = [SharedMemoryBarrier(pages, range(10, 15), i, Wait("test", None), "test") for i in range(5)]
    dead, all_have_agreed = {13}, threading.Barrier(4, timeout=20)

    def agree(place):
        looks = []

        def seen():  # by some at once, by others later
            looks.append(1)
            return set(dead) if len(looks) > place else set()

        lost = members[place].agree_on_lost(0, 1, seen)
        if place == 1:
            dead.add(11)
        all_have_agreed.wait()
        again = [] if place == 1 else members[place].agree_on_lost(0, 2, lambda: set(dead))
        return lost, again

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(agree, [0, 1, 2, 4], timeout=60))
    assert found == [([13], [11, 13]), ([13], []), ([13], [11, 13]), ([13], [11, 13])]


def test_members_agree_where_one_sees_two_die_of_which_the_second_had_agreed_to_go_on_without_the_first():
    """Member 3 dies; 0 and 2 write that they go on without it, and 2 dies before 1 has looked: it misses both."""
    pages = [np.zeros(PAGE, np.uint8) for _ in range(4)]
    members = [SharedMemoryBarrier(pages, range(10, 14), i, Wait("test", None), "test") for i in range(4)]
    end = time.monotonic() + 20

    def agree(place, *seen):
        looks = iter(seen)

        def dead():
            if time.monotonic() > end:
                raise TimeoutError
            return next(looks, {12, 13})

        return members[place].agree_on_lost(0, 1, dead)

    def dies():
        looks.append(1)
        if len(looks) > 2:  # it has written what it has seen
            raise InterruptedError
        return {13}

    looks = []
    with pytest.raises(InterruptedError):
        members[2].agree_on_lost(0, 1, dies)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(agree, 0, {13}, {13})
        second = threads.submit(agree, 1)
        assert first.result(30) == second.result(30) == [12, 13]


def test_a_member_that_is_in_the_next_agreement_already_is_still_heard_in_the_one_before():
    pages = [np.zeros(PAGE, np.uint8) for _ in range(4)]
    members = [SharedMemoryBarrier(pages, range(4), i, Wait("test", None), "test") for i in range(4)]
    end, is_ahead = time.monotonic() + 20, threading.Event()

    def agree(place):
        looks = []

        def first_dead():
            looks.append(1)
            if time.monotonic() > end:
                raise TimeoutError
            if place and len(looks) == 3:  # it has written, and looks at the others no sooner than this
                is_ahead.wait(20)
            return {3}

        def next_dead():
            is_ahead.set()
            if time.monotonic() > end:
                raise TimeoutError
            return {2, 3}

        found = members[place].agree_on_lost(0, 1, first_dead)
        return [found, [] if place == 2 else members[place].agree_on_lost(0, 2, next_dead)]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(agree, range(3), timeout=30)) == [[[3], [2, 3]], [[3], [2, 3]], [[3], []]]


def test_many_barriers_keep_everyone_in_step(members, on_all):
    counts = [0] * SIZE

    def count(member):
        own, ahead = members.index(member), 0
        for _ in range(50):
            counts[own] += 1
            member.synchronize()
            ahead = max(ahead, max(counts) - counts[own])
        return ahead

    assert max(on_all(count)) <= 1


def test_a_member_that_withdraws_ends_the_others_waits(members, on_all):
    def arrive(member):
        if members.index(member) == 1:
            time.sleep(0.05)
            member.withdraw("rank 1 was interrupted")
            member.synchronize()
        else:
            member.arrive(STEP)

    first, own, last = on_all(arrive)
    for error in (first, last):
        assert isinstance(error, PeerFailed)
        assert (str(error), error.rank) == ("rank 1 was interrupted", 1)
    assert isinstance(own, RingError) and "takes part no more" in str(own)


def test_a_waiting_member_calls_meanwhile(members, on_all):
    called = threading.Event()

    def arrive(member):
        if members.index(member) == 2:
            assert called.wait(50)
            member.arrive(STEP)
        else:
            member.arrive(STEP, called.set)

    assert on_all(arrive) == [None] * SIZE


def test_all_members_raise_the_same_mismatch(members, on_all):
    other = fingerprint("broadcast", "int8", 3, "root 0")
    errors = on_all(lambda member: member.arrive(other if members.index(member) == 1 else STEP))
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], MismatchError)
    text = re.sub(rf" at {re.escape(__file__)}, line [^.]*?(?=, but|\.)", "", str(errors[0]))  # where both are
    assert "ranks 0, 2 call barrier(), but rank 1 calls broadcast(3 x int8, root 0)." in text


def test_a_mismatch_between_hosts_reaches_members_that_wait(members, on_all):
    def arrive(member):
        if members.index(member) == 0:
            time.sleep(0.05)
            member.report_mismatch(MismatchError("host 1 is elsewhere"))
        else:
            member.arrive(STEP)

    errors = on_all(arrive)[1:]
    assert [str(error) for error in errors] == ["host 1 is elsewhere"] * 2
