"""Which hosts of a job get the slots by which it grows."""

from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.launcher.added_slots import MOST_ADDED, AddedSlots, world_ranks

HOSTS = {0: "host1", 1: "host2"}


def growing(most=8, ranks=(2, 2)):
    first = [list(range(sum(ranks[:host]), sum(ranks[: host + 1]))) for host in range(len(ranks))]
    return AddedSlots(sum(ranks), most, first)


def told(slots):
    return [tuple(slot) for slot in slots.told()["slots"]]


def test_each_goes_to_a_host_that_has_the_fewest_and_those_of_one_host_follow_each_other():
    slots = growing(ranks=(3, 1))
    assert slots.add(3, HOSTS) == "ok: rank 4 on host1 and ranks 5, 6 on host2 will join where an epoch begins"
    assert told(slots) == [(4, 0, 0), (5, 1, 0), (6, 1, 0)]
    assert slots.add(1, {0: "host1"}) == "ok: rank 7 on host1 will join where an epoch begins"
    assert told(slots) == [(4, 0, 0), (5, 1, 0), (6, 1, 0), (7, 0, 0)] and slots.told()["in use"] == 8


def test_more_than_there_is_room_for_is_rejected():
    slots = growing(most=5)
    assert slots.add(2, HOSTS) == "no: 2 asked for, but 1 of the job's 5 slots (--max-ranks 5) is free"
    assert growing(most=0).add(1, HOSTS).startswith("no: the job was started without --max-ranks")
    assert not told(slots)


def test_a_slot_that_is_given_back_takes_those_behind_it_along_and_is_free_again():
    slots = growing()
    slots.add(3, HOSTS)
    slots.note_joined([4])
    slots.take_back(4, 0)  # its host has not seen yet that it has joined
    assert len(told(slots)) == 3
    slots.take_back(5, 1)  # which is not its host
    assert len(told(slots)) == 3
    slots.take_back(5, 0)
    assert told(slots) == [(4, 0, 0)]
    assert slots.add(1, {1: "host2"}) == "ok: rank 5 on host2 will join where an epoch begins"
    assert told(slots) == [(4, 0, 0), (5, 1, 1)], "whose first process needs another world rank than 5"


def test_what_a_lost_host_had_and_what_waits_behind_it_is_given_out_anew():
    slots = growing()
    slots.add(2, {1: "host2"})
    slots.add(1, {0: "host1"})
    slots.note_joined([4])
    assert slots.note_end(1, [0]) == [5, 6]
    assert told(slots) == [(5, 0, 1), (6, 0, 1)]
    assert slots.add(9, {0: "host1"}).startswith(
        "no: 9 asked for, but 4 of the job's 8 slots (--max-ranks 8) are free"
    ), "with 2, 3, 4 of host2"
    assert slots.add(2, {0: "host1"}) == "ok: ranks 2, 3 on host1 will join"
    assert told(slots) == [(2, 0, 1), (3, 0, 1), (5, 0, 1), (6, 0, 1)]
    slots.note_joined([5, 6])
    assert slots.of_host(0) == [0, 1, 2, 3, 5, 6] and slots.note_end(0, []) == [2, 3]
    slots = growing()
    slots.add(1, HOSTS)
    assert slots.note_end(0, []) == [4] and told(slots) == [], "nobody is left"


def test_no_two_hosts_have_the_same_numbers_for_processes():
    numbers = [one for host in range(3) for one in world_ranks(host, 3, 8)]
    numbers += [one for host in range(3, 3 + MOST_ADDED) for one in world_ranks(host, None, 0)]
    assert len(set(numbers)) == len(numbers) and min(numbers) == 8 and max(numbers) < MOST_MEMBERS
