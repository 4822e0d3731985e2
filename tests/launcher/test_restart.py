"""Which slots `ring run` fills again, with processes that say in the slots what ranks would say."""

import os
import sys

import numpy as np
import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.member import Member
from ring_plugins.core.rendezvous.slots import FOLLOWED, HOPELESS, OwnSlot, Slots, State
from ring_plugins.launcher import restart
from ring_plugins.launcher.job_hosts import FAILED, OUT
from ring_plugins.launcher.processes import Processes
from ring_plugins.launcher.restart import SlotProcesses

KILLED = "os.kill(os.getpid(), 9)"
RUNS = "time.sleep(3600)"


class Job:
    """Two slots of four are in use; processes end as told, and each further one ends so, too."""

    def __init__(self, processes):
        self.processes, self.told, self.started = processes, [], []
        self.rows = Slots(np.zeros(Slots.nbytes(4), np.uint8))
        self.next, self.standby, self.renamed = "sys.exit(1)", RUNS, []
        self.error = None

    def begin(self, *codes, standbys=0, ranks=(0, 1), size=2, unused=range(4, 20), joined=True):
        """Start the first ranks; returns their processes, of which those that do not sleep have ended."""
        self.codes = list(codes)
        self.slots = SlotProcesses(
            self.rows,
            ranks,
            size,
            self.start,
            self.told.append,
            world_ranks=iter(unused),
            standbys=standbys,
            rename=lambda *ranks: self.renamed.append(ranks),
        )
        self.slots.start_first()
        for slot, rank in enumerate(ranks if joined else ()):
            self.join(slot, rank)
        return [slot.process for slot in self.slots._slots]

    def start(self, slot, world_rank):
        is_first = bool(self.codes)
        code = self.codes.pop(0) if is_first else self.standby if slot is None else self.next
        if not is_first:
            self.started.append((slot, world_rank))
            if self.error is not None:
                raise self.error
        process = self.processes.start([sys.executable, "-c", f"import os, sys, time; {code}"], os.environ)
        if "sleep" not in code:
            process.wait()
        return process

    def join(self, slot, world_rank):
        self.rows.take(Member(world_rank, slot, liveness=(1, 2, 3)), as_member=True)

    def process(self, slot):
        return self.slots._slots[slot].process

    def tick(self, times=1):
        for _ in range(times):
            self.slots.tick()

    def are_late(self):
        return [slot for slot, how in enumerate(self.slots.hows()) if how == "late"]

    def is_out(self, slot):
        return self.slots.hows()[slot] in OUT

    def ends_job(self, slot):
        self.slots.codes()
        return self.slots.hows()[slot] in FAILED

    def standbys(self):
        return [one.process for one in self.slots._standbys]


def end(process):
    process.kill()
    process.wait()


@pytest.fixture
def job():
    with Processes() as processes:
        yield Job(processes)


def test_a_slot_is_filled_until_it_has_failed_too_often(job):
    job.begin(RUNS, KILLED, joined=False)
    job.join(0, 0)
    job.tick()
    assert not job.started  # it died before the ranks were connected, which the launcher reports
    job.join(1, 1)
    job.tick(8)
    assert job.started == [(1, 4), (1, 5), (1, 6), (1, 7), (1, 8)]
    assert job.slots.replaced == {} and job.is_out(1) and not job.is_out(0)
    assert job.are_late() == [1] and job.slots.ends() == [(1, 1, "late", False)]
    assert job.told[-1] == "rank 1 was replaced 5 times within an hour; the job goes on without it."
    assert not [text for text in job.told if "before it joined" in text]  # they print errors themselves


@pytest.mark.parametrize("code", ["sys.exit(0)", "sys.exit(3)"])
def test_one_that_ends_normally_or_fails_is_not_replaced(job, code):
    job.begin(RUNS, code)
    OwnSlot(job.rows.memory, 1).note_end()
    job.tick()
    assert not job.started


def test_one_that_ends_with_status_0_while_the_others_go_on_without_it_is_lost(job):
    job.begin(RUNS, "sys.exit(0)")
    job.rows.note_lost(1)
    assert job.slots.ends() == [(1, 0, "lost", False)]
    assert job.is_out(1) and not job.is_out(0)
    job.tick()
    assert job.started == [(1, 4)]


def test_a_lost_one_that_ended_with_another_status_still_ends_the_job(job):
    job.begin(RUNS, "sys.exit(3)")
    job.rows.note_lost(1)
    OwnSlot(job.rows.memory, 1).note_end()
    assert not job.is_out(1) and job.ends_job(1)
    job.tick()
    assert not job.started


@pytest.mark.parametrize(
    ("code", "how"), [("sys.exit(0)", "ended with exit status 0"), (KILLED, "was killed by SIGKILL")]
)
def test_one_that_ends_before_it_waits_to_join_is_followed_by_another_and_the_user_hears_how(job, code, how):
    job.begin(RUNS, KILLED)
    job.next = code
    job.tick(8)
    assert len(job.started) == 5
    told = [text for text in job.told if text.startswith(f"the process that was to take the place of rank 1 {how}")]
    assert len(told) >= 5 and told[0].endswith(" before it joined.")


def test_one_that_has_waited_to_join_and_ends_with_status_0_has_found_that_the_job_is_over(job):
    job.begin(RUNS, KILLED)
    job.next = "sys.exit(0)"
    job.tick()
    job.rows.take(Member(4, 1, liveness=(1, 2, 3)), as_member=False)
    job.tick()
    assert job.started == [(1, 4)]


def test_one_that_has_not_joined_when_the_others_end_is_killed(job):
    living, _ = job.begin(RUNS, KILLED)
    job.next = RUNS
    job.tick()
    joiner = job.process(1)
    job.tick()
    assert joiner.poll() is None
    end(living)
    job.tick()
    assert joiner.wait(10) == -9


def test_one_that_joins_last_of_all_and_is_a_member_when_the_others_end_is_not_killed(job):
    """It becomes one after the others were looked at, and they end before it is."""
    member, _ = job.begin(RUNS, KILLED)
    job.next = RUNS
    job.tick()
    joiner = job.process(1)

    def poll():
        job.join(1, 4)
        member.returncode = 0
        return 0

    killed, pid = [], member.pid
    member.poll, joiner.kill = poll, lambda: killed.append(os.kill(joiner.pid, 9))
    job.tick()
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert not killed and job.slots.replaced == {1: 1} and job.started == [(1, 4)]


def test_a_standby_that_waits_gets_the_slot_and_another_is_started(job):
    _, dying = job.begin(RUNS, RUNS, standbys=2, joined=False)
    job.tick()
    assert not job.started  # nobody is there yet who could let it join
    job.join(0, 0)
    job.join(1, 1)
    job.tick()
    assert job.started == [(None, 4), (None, 5)]
    job.rows.wait_as_standby(5)  # the other is not there yet
    _, ready = job.standbys()
    end(dying)
    job.tick()
    assert job.started == [(None, 4), (None, 5), (None, 6)] and job.renamed == [(5, 1)]
    assert job.rows.given(5) == 1 and job.process(1) is ready and job.slots.running()[1:] == [ready]
    assert job.slots.replaced == {} and job.is_out(1)
    assert job.told == ["a standby process takes the place of rank 1."]
    job.join(1, 5)
    assert job.slots.replaced == {1: 1} and not job.is_out(1)
    assert len(job.standbys()) == 2 and not set(job.standbys()) & set(job.slots.running())  # nobody waits for them


def test_one_that_is_still_starting_gets_the_slot_if_none_waits_and_none_that_is_stopped_or_has_ended(job, monkeypatch):
    _, dying = job.begin(RUNS, RUNS, standbys=3)
    job.tick()
    ended, stopped, starting = job.standbys()
    monkeypatch.setattr(restart, "state", lambda pid: "T" if pid == stopped.pid else "S")
    end(ended)
    end(dying)
    job.tick()
    assert job.process(1) is starting and job.renamed == [(6, 1)]
    end(job.process(1))
    for one in job.standbys()[1:]:
        end(one)
    job.tick()
    assert job.process(1) is not stopped and job.started[-1][0] is None and (1, 9) in job.started


def test_a_script_in_which_no_process_can_join_is_tried_once(job):
    job.begin(RUNS, KILLED)
    job.tick()
    OwnSlot(job.rows.memory, 1).note_end(HOPELESS)
    job.tick(3)
    assert job.started == [(1, 4)]
    text = "no process can take the place of rank 1, as the error above says; the job goes on without it."
    assert job.told == ["starting another process in the place of rank 1.", text]


def test_a_process_that_joined_and_died_again_counts(job):
    job.begin(RUNS, KILLED)
    job.next = KILLED
    job.tick()
    job.join(1, 4)
    assert job.slots.replaced == {1: 1} and job.are_late() == []
    job.tick()  # its successor has not joined
    assert job.slots.replaced == {1: 1} and job.are_late() == [1]
    job.join(1, 5)
    assert job.slots.replaced == {1: 2}


def test_standbys_that_end_unused_are_replaced_a_few_times_and_count_for_no_slot(job):
    _, dying = job.begin(RUNS, RUNS, standbys=1)
    job.standby = KILLED
    job.tick(8)
    assert job.started == [(None, rank) for rank in range(4, 9)] and job.slots.replaced == {}
    assert job.told[0] == "a standby process was killed by SIGKILL (out of memory? `kill -9`?) before it was needed."
    assert job.told[-1].endswith("before it was needed, the 5th within an hour; no more are started.")
    assert len(job.told) == 5
    end(dying)
    job.next = RUNS
    job.tick()
    assert job.started[-1] == (1, 9) and job.told[-1] == "starting another process in the place of rank 1."


def test_ends_of_standbys_count_for_an_hour(job, monkeypatch):
    now = 0.0
    monkeypatch.setattr(restart.time, "monotonic", lambda: now)
    job.begin(RUNS, RUNS, standbys=1)
    job.standby = "sys.exit(0)"
    job.tick()
    for now in (0.0, 4000.0, 4001.0, 4002.0, 4003.0, 4004.0):  # noqa: B007 - the clock reads it
        job.tick()
    assert len(job.started) == 6
    assert job.told[-2:] == [
        "a standby process ended before it was needed.",
        "a standby process ended before it was needed, the 5th within an hour; no more are started.",
    ]


def test_a_standby_that_cannot_be_started_is_told_and_counts(job):
    job.begin(RUNS, RUNS, standbys=1)
    job.error = LaunchError("no memory")
    job.tick()
    assert job.told[0] == "a standby process could not be started: no memory."
    assert len(job.told) == 5 and job.told[-1].endswith("the 5th within an hour; no more are started.")


def test_no_more_are_started_than_there_are_world_ranks(job):
    _, dying = job.begin(RUNS, RUNS, standbys=3, unused=[4, 5])
    job.tick()
    assert job.started == [(None, 4), (None, 5)] and job.told == []
    for process in (dying, *job.standbys()):
        end(process)
    job.tick()
    assert "rank 1 is not replaced, since the job has had too many processes; the job goes on without it." in job.told


def test_a_process_that_cannot_be_started_counts_as_one_that_has_ended(job):
    job.begin(RUNS, KILLED)
    job.error = LaunchError("no memory")
    job.tick(8)
    assert [slot for slot, _ in job.started] == [1] * 5 and job.told[1] == "no memory"
    assert job.told[-1] == "rank 1 was replaced 5 times within an hour; the job goes on without it."


def test_one_that_leaves_is_replaced_and_no_one_if_nobody_has_the_state(job):
    _, living = job.begin("sys.exit(0)", RUNS)
    OwnSlot(job.rows.memory, 0).note(State.LEFT)
    job.next = KILLED
    job.tick()
    assert job.started == [(0, 4)]
    end(living)
    job.tick()
    assert job.started == [(0, 4)]
    assert job.slots.running() == [] and [how for _, _, how, _ in job.slots.ends()] == ["late", ""]


def test_added_ranks_take_the_slots_that_nobody_has_had(job):
    job.begin(RUNS, RUNS, standbys=1)
    job.tick()
    job.rows.wait_as_standby(4)
    job.slots.follow([(2, 0), (3, 0)])
    job.next = RUNS
    job.tick()
    assert job.started == [(None, 4), (3, 3), (None, 5)] and job.renamed == [(4, 2)]
    assert job.told == ["a standby process becomes rank 2.", "starting another process as rank 3."]
    assert job.is_out(2) and job.are_late() == [2, 3] and job.slots.added == []
    job.join(2, 4)
    end(job.process(3))
    job.tick()
    assert job.started[-1] == (None, 6) and job.renamed[-1] == (5, 3)
    job.join(3, 5)
    assert job.slots.added == [2, 3] and job.slots.replaced == {} and job.are_late() == []
    assert not job.is_out(3)


def test_added_ranks_that_fail_before_they_join_end_the_wish_for_those_behind_them_too(job):
    job.begin(RUNS, RUNS)
    job.slots.follow([(2, 0)])
    job.tick(4)
    job.slots.follow([(2, 0), (3, 0)])
    job.next = RUNS
    job.tick()
    waiting = job.process(3)
    end(job.process(2))
    job.tick()
    assert [slot for slot, _ in job.started] == [2, 2, 2, 2, 2, 3]
    assert job.started[0] == (2, 2) and job.started[-1] == (3, 3)
    assert job.told[-1] == "rank 2 was started 5 times within an hour; the job goes on without it."
    assert waiting.poll() == -9 and len(job.slots.codes()) == 2 and job.rows.in_use == 2
    assert job.slots.given_back == [2]


def test_on_one_of_several_hosts_it_follows_the_list_of_added_slots(job):
    """Those by which processes have joined stay, and of the others those that are listed with the same attempt."""
    job.begin(RUNS, RUNS, ranks=[2, 3], size=4, unused=range(11, 20, 2))
    job.next = RUNS
    job.slots.follow([(5, 0), (7, 0)])
    job.tick()
    assert job.started == [(2, 5), (3, 7)] and job.told[-1] == "starting another process as rank 7."
    job.join(2, 5)
    job.slots.follow([])
    assert len(job.slots.codes()) == 3 and job.slots.names == [2, 3, 5]
    job.slots.follow([(5, 0), (6, 1)])
    job.tick()
    assert job.started[2:] == [(3, 11)] and job.slots.names == [2, 3, 5, 6] and job.are_late() == [3]
    job.next = KILLED
    for _ in range(5):
        end(job.process(3))
        job.tick()
    assert job.slots.given_back == [6] and job.slots.added == [5]
    assert job.told[-1] == "rank 6 was started 5 times within an hour; the job goes on without it."


# How the processes of slots end, and what that means ----------------------------------------------


@pytest.mark.parametrize("killed", [KILLED, "sys.exit(137)"])  # also the command of a shell
def test_a_killed_process_ends_the_others_only_if_losses_are_not_tolerated(job, killed):
    job.begin(killed, RUNS, joined=False)
    assert not job.ends_job(0)
    job.slots._recovers = False
    assert job.ends_job(0) and not job.ends_job(1)


def test_a_process_that_was_killed_since_memory_ran_out_is_named_as_such(job, monkeypatch):
    """As the kernel's counter says, which also counts others: so only of a process that ended when it rose."""
    kills = [7]
    monkeypatch.setattr(restart, "memory_kills", lambda: kills[0])
    first, other, last = job.begin(RUNS, RUNS, RUNS, ranks=[0, 1, 2])
    end(first)
    job.slots.running()
    kills[0] = 8
    other.terminate()
    other.wait()
    job.slots.running()
    end(last)
    assert job.slots.running() == []
    assert job.slots.silent_end(0) == "was killed by SIGKILL (out of memory? `kill -9`?)"
    assert job.slots.silent_end(2).startswith("was killed by SIGKILL, and may have been since memory ran out")
    assert job.told == [f"rank 2 {job.slots.silent_end(2)}."]
    assert [of_memory for *_, of_memory in job.slots.ends()] == [False, False, True]


def test_ends_are_told_in_their_order_and_those_that_were_killed_with_the_others_have_followed(job):
    """A process that says that it ended because of another has followed it, too."""
    first, _other, last = job.begin(RUNS, "sys.exit(3)", RUNS, ranks=[0, 1, 2])
    for slot in range(3):
        OwnSlot(job.rows.memory, slot).note_end(FOLLOWED if slot == 2 else 1)
    job.slots._recovers = False
    last.terminate()
    last.wait()
    job.slots.running()
    job.slots.are_killed = True
    end(first)
    assert [tuple(one[:3]) for one in job.slots.ends()] == [(1, 3, "failed"), (2, -15, "followed"), (0, -9, "followed")]


def test_a_rank_that_ended_without_a_word_is_lost_rather_than_a_failure(job):
    job.begin("sys.exit(3)", "sys.exit(3)")
    OwnSlot(job.rows.memory, 1).note_end()
    assert [job.ends_job(slot) for slot in range(2)] == [False, True]
    assert [how for _, _, how, _ in job.slots.ends()] == ["lost", "failed"]


def test_one_that_is_told_to_leave_does_so_once_and_another_takes_its_place_only_if_it_is_wanted(job):
    job.begin(RUNS, RUNS)
    job.next = RUNS
    job.slots.let_leave([1])
    job.tick(3)
    job.process(1).wait(30)
    OwnSlot(job.rows.memory, 1).note(State.LEFT)
    job.tick(3)
    assert job.process(1).returncode == -15 and job.started == [] and job.told == []
    assert job.slots.given_back == [1] and job.slots.were_let_go
    job.slots.follow([(1, 1)])
    job.tick()
    assert job.started == [(1, 4)] and job.told == ["starting another process in the place of rank 1."]


def test_one_that_has_not_come_yet_is_not_told_to_leave_before_it_has(job):
    job.begin(RUNS, RUNS, joined=False)
    job.slots.let_leave([1])
    job.tick(2)
    assert job.process(1).poll() is None
    job.join(1, 1)
    job.tick()
    assert job.process(1).wait(30) == -15


def test_one_that_has_not_joined_is_killed_if_nobody_is_wanted_there(job):
    job.begin(RUNS, KILLED)
    job.next = RUNS
    job.tick()
    job.slots.let_leave([1])
    job.tick()
    assert job.process(1).wait(30) == -9
    job.tick(2)
    assert len(job.started) == 1 and job.slots.given_back == [1]
