"""How far ranks have come where they meet, and what the environment of each says."""

import pytest

from ring_plugins.core.base.member import Member
from ring_plugins.core.rendezvous.slots import OwnSlot, State
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous
from ring_plugins.launcher.coordinator_link import HostJob
from ring_plugins.launcher.meeting import Meeting, place_ranks


def in_memory(size, most):
    job = HostJob([], 0, "", 0, 1, range(size), size, ["true"], most=most)
    return Meeting(job, in_memory=True)


@pytest.fixture
def at_an_address():
    job = HostJob(["10.0.0.1"], 7, "key", 1, 2, [2, 3], 4, ["true"], most=6)
    found = Meeting(job)
    found.begin({"address": "10.0.0.1", "port": 29, "secret": "hush"})
    yield found
    found.segment.close_file()


def test_a_rank_of_one_host_has_not_come_while_others_wait_for_it():
    meeting = in_memory(2, 3)
    assert [meeting.is_awaited(local, True) for local in range(3)] == ["", "", ""]
    first = SharedMemoryRendezvous(meeting.segment, 0, 2, [], 3)
    words, _ = first._cell(0)
    words[0] = 1  # as `gather` does before it waits
    assert [meeting.is_awaited(local, False) for local in range(3)] == ["", "reached", ""]
    meeting.segment.close_file()


def test_a_process_that_joins_one_host_sees_the_slots_that_are_in_use():
    meeting = in_memory(2, 4)
    assert meeting.environment(1, 1, 2, False)["RING_SPAWNED"].split(":")[1:] == ["1", "2", "0", "4"]
    meeting.note_in_use(3)
    assert meeting.environment(2, 2, 3, True)["RING_SPAWNED"].split(":")[1:] == ["2", "3", "0", "4"]
    assert meeting.environment(None, 5, 3, True)["LOCAL_RANK"] == "2"  # a standby, which has no slot yet
    meeting.segment.close_file()


def test_a_rank_of_several_hosts_is_awaited_once_another_waits_or_if_it_was_killed(at_an_address):
    slots = at_an_address.slots
    assert at_an_address.is_awaited(1, was_killed=False) == ""
    assert at_an_address.is_awaited(1, was_killed=True) == "reached"
    OwnSlot(slots.memory, 0).note(State.STARTING)
    assert at_an_address.is_awaited(1, was_killed=False) == "reached"
    assert at_an_address.is_awaited(0, was_killed=False) == "completed"
    slots.take(Member(3, 1, liveness=(1, 2, 3)), as_member=True)
    assert at_an_address.is_awaited(1, was_killed=True) == ""


def test_a_process_that_joins_several_hosts_gets_the_size_that_the_job_has_then(at_an_address):
    assert at_an_address.environment(0, 2, 2, False)["WORLD_SIZE"] == "4"
    at_an_address.note_in_use(5)
    found = at_an_address.environment(2, 4, 3, True)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["MASTER_PORT"]) == ("4", "5", "2", "29")
    assert found["RING_SECRET"] == "hush" and found["RING_SLOT"].endswith(":6:2")


def test_ranks_of_one_host_follow_each_other_whatever_the_schedulers_order():
    placed = place_ranks([("b", "10.0.0.2", 5), ("a", "10.0.0.1", 4), ("b", "10.0.0.2", 6)], "hush")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    found = [(rank, *(int(variables[name]) for name in names)) for rank, variables in placed]
    assert found == [(0, 0, 3, 0, 2, 0, 2), (2, 2, 3, 0, 1, 1, 2), (1, 1, 3, 1, 2, 0, 2)]
    assert {(variables["MASTER_ADDR"], variables["MASTER_PORT"]) for _, variables in placed} == {("10.0.0.2", "5")}


def test_an_assignment_overrides_the_launcher_under_which_the_scheduler_runs():
    ((rank, variables),) = place_ranks([("a", "10.0.0.1", 4000)], "hush")
    assert rank == 0 and variables["RING_SECRET"] == "hush"
    assert (variables["RING_LAUNCHER"], variables["RANK"], variables["WORLD_SIZE"]) == ("rendezvous", "0", "1")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "4000")
