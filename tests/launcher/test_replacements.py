"""Which slots `ring run` fills again, with processes that say in the slots what ranks would say."""

import os
import sys
import time

import numpy as np
import pytest

from ring_plugins.core.rendezvous.slots import HOPELESS, SlotOwner, Slots
from ring_plugins.launcher.replacements import Replacements
from ring_plugins.launcher.standbys import Standbys
from ring_plugins.launcher.supervision import Supervisor


class Job:
    """Two slots of four are in use; processes end as told, and `start` starts another that ends so."""

    def __init__(self, supervisor):
        self.supervisor, self.told, self.started = supervisor, [], []
        self.slots = Slots(np.zeros(Slots.nbytes(4), np.uint8))
        self.next, self.ends = "sys.exit(1)", True
        self.standby, self.renamed = "time.sleep(3600)", []
        self.unused = iter(range(4, 20))
        self.keep(0)

    def keep(self, standbys):
        """Have so many standbys from now on."""
        standbys = Standbys(self.supervisor, self.slots, standbys, self.unused, self.start_standby, self.rename)
        self.replacements = Replacements(
            self.supervisor, self.slots, [0, 1], 2, self.unused, self.start, self.told.append, standbys
        )
        self.supervisor.is_out = self.replacements.is_out

    def rename(self, world_rank, slot):
        self.renamed.append((world_rank, slot))

    def start_standby(self, world_rank):
        self.started.append((None, world_rank))
        code = f"import os, sys, time; {self.standby}"
        process = self.supervisor.start([sys.executable, "-c", code], os.environ, is_standby=True)
        if "sleep" not in self.standby:
            process.wait()
        return process

    def run(self, code, index=None):
        return self.supervisor.start([sys.executable, "-c", f"import os, sys, time; {code}"], os.environ, index=index)

    def start(self, slot, world_rank):
        self.started.append((slot, world_rank))
        process = self.run(self.next, slot)
        if self.ends:
            process.wait()

    def join(self, slot, world_rank):
        self.slots.take(SlotOwner(slot, world_rank, (1, 2, 3)), as_member=True)


@pytest.fixture
def job():
    with Supervisor(recovers=True) as supervisor:
        yield Job(supervisor)


def test_a_slot_is_filled_until_it_has_failed_too_often(job):
    living = job.run("time.sleep(3600)")
    job.run("os.kill(os.getpid(), 9)").wait()
    job.join(0, 0)
    job.replacements.tick()
    assert not job.started  # it died before the ranks were connected, which the launcher reports
    job.join(1, 1)
    for _ in range(8):
        job.replacements.tick()
    assert job.started == [(1, 4), (1, 5), (1, 6), (1, 7), (1, 8)]
    assert job.replacements.filled == {} and job.replacements.is_out(1) and not job.replacements.is_out(0)
    assert job.replacements.late == [1]
    assert job.told[-1] == "rank 1 was replaced 5 times within an hour; the job goes on without it."
    assert not [text for text in job.told if "before it joined" in text]  # they print errors themselves
    living.kill()


@pytest.mark.parametrize("code", ["sys.exit(0)", "sys.exit(3)"])
def test_one_that_ends_normally_or_fails_is_not_replaced(job, code):
    job.run("time.sleep(3600)")
    job.run(code).wait()
    job.join(0, 0)
    job.join(1, 1)
    job.replacements.tick()
    assert not job.started


def test_one_that_ends_with_status_0_while_the_others_go_on_without_it_is_lost(job):
    job.run("time.sleep(3600)")
    job.run("sys.exit(0)").wait()
    job.join(0, 0)
    job.join(1, 1)
    job.slots.note_lost(1)
    assert job.replacements.is_out(1) and not job.replacements.is_out(0)
    job.replacements.tick()
    assert job.started == [(1, 4)]


def test_a_lost_one_that_ended_with_another_status_still_ends_the_job(job):
    job.run("time.sleep(3600)")
    job.run("sys.exit(3)").wait()
    job.join(0, 0)
    job.join(1, 1)
    job.slots.note_lost(1)
    assert not job.replacements.is_out(1)
    job.replacements.tick()
    assert not job.started


@pytest.mark.parametrize(
    ("code", "how"), [("sys.exit(0)", "ended with exit status 0"), ("os.kill(os.getpid(), 9)", "was killed by SIGKILL")]
)
def test_one_that_ends_before_it_waits_to_join_is_followed_by_another_and_the_user_hears_how(job, code, how):
    job.run("time.sleep(3600)")
    job.run("os.kill(os.getpid(), 9)").wait()
    job.join(0, 0)
    job.join(1, 1)
    job.next = code
    for _ in range(8):
        job.replacements.tick()
    assert len(job.started) == 5
    told = [text for text in job.told if text.startswith(f"the process that was to take the place of rank 1 {how}")]
    assert len(told) >= 5 and told[0].endswith(" before it joined.")


def test_one_that_has_waited_to_join_and_ends_with_status_0_has_found_that_the_job_is_over(job):
    job.run("time.sleep(3600)")
    job.run("os.kill(os.getpid(), 9)").wait()
    job.join(0, 0)
    job.join(1, 1)
    job.next = "sys.exit(0)"
    job.replacements.tick()
    job.slots.take(SlotOwner(1, 4, (1, 2, 3)), as_member=False)
    job.replacements.tick()
    assert job.started == [(1, 4)]


def test_one_that_has_not_joined_when_the_others_end_is_killed(job):
    living = job.run("time.sleep(3600)")
    job.run("os.kill(os.getpid(), 9)").wait()
    job.join(0, 0)
    job.join(1, 1)
    job.next, job.ends = "time.sleep(3600)", False
    job.replacements.tick()
    joiner = job.supervisor.processes[1]
    job.replacements.tick()
    assert joiner.poll() is None
    living.kill()
    living.wait()
    job.replacements.tick()
    assert joiner.wait(10) == -9


def test_one_that_joins_last_of_all_and_is_a_member_when_the_others_end_is_not_killed(job):
    """It becomes one after the others were looked at, and they end before it is."""
    member = job.run("time.sleep(3600)")
    job.run("os.kill(os.getpid(), 9)").wait()
    job.join(0, 0)
    job.join(1, 1)
    job.next, job.ends = "time.sleep(3600)", False
    job.replacements.tick()
    joiner = job.supervisor.processes[1]

    def poll():
        job.join(1, 4)
        member.returncode = 0
        return 0

    killed, pid = [], member.pid
    member.poll, joiner.kill = poll, lambda: killed.append(os.kill(joiner.pid, 9))
    job.replacements.tick()
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert not killed and job.replacements.filled == {1: 1} and job.started == [(1, 4)]


def test_a_standby_that_waits_gets_the_slot_and_another_is_started(job):
    job.keep(2)
    job.replacements.tick()
    assert not job.started  # nobody is there yet who could let it join
    living, dying = job.run("time.sleep(3600)"), job.run("time.sleep(3600)")
    job.join(0, 0)
    job.join(1, 1)
    job.replacements.tick()
    assert job.started == [(None, 4), (None, 5)]
    job.slots.wait_as_standby(5)  # the other is not there yet
    ready = job.supervisor.standbys[1]
    dying.kill()
    dying.wait()
    job.replacements.tick()
    assert job.started == [(None, 4), (None, 5), (None, 6)] and job.renamed == [(5, 1)]
    assert job.slots.given(5) == 1 and job.supervisor.processes == [living, ready]
    assert job.replacements.filled == {} and job.replacements.is_out(1)
    assert job.told == ["a standby process takes the place of rank 1."]
    job.join(1, 5)
    assert job.replacements.filled == {1: 1} and not job.replacements.is_out(1)
    standbys = job.supervisor.standbys
    living.kill()
    ready.kill()
    job.supervisor.wait()
    assert len(standbys) == 2 and all(standby.poll() == -9 for standby in standbys)  # nobody waits for them


def test_a_script_in_which_no_process_can_join_is_tried_once(job):
    living = job.run("time.sleep(3600)")
    job.run("os.kill(os.getpid(), 9)").wait()
    job.join(0, 0)
    job.join(1, 1)
    job.replacements.tick()
    job.slots.note_end(1, HOPELESS)
    for _ in range(3):
        job.replacements.tick()
    assert job.started == [(1, 4)]
    text = "no process can take the place of rank 1, as the error above says; the job goes on without it."
    assert job.told == ["starting another process in the place of rank 1.", text]
    living.kill()


def test_a_process_that_joined_and_died_again_counts(job):
    living = job.run("time.sleep(3600)")
    job.run("os.kill(os.getpid(), 9)").wait()
    job.join(0, 0)
    job.join(1, 1)
    job.next = "os.kill(os.getpid(), 9)"
    job.replacements.tick()
    job.join(1, 4)
    assert job.replacements.filled == {1: 1} and job.replacements.late == []
    job.replacements.tick()  # its successor has not joined
    assert job.replacements.filled == {1: 1} and job.replacements.late == [1]
    job.join(1, 5)
    assert job.replacements.filled == {1: 2}
    living.kill()


def test_standbys_that_end_unused_are_replaced_a_few_times_and_count_for_no_slot(job):
    job.run("time.sleep(3600)")
    dying = job.run("time.sleep(3600)")
    job.join(0, 0)
    job.join(1, 1)
    job.keep(1)
    job.standby = "os.kill(os.getpid(), 9)"
    for _ in range(8):
        job.replacements.tick()
    assert job.started == [(None, rank) for rank in range(4, 9)] and job.replacements.filled == {}
    assert job.told[0].startswith("a standby process was killed by SIGKILL")
    assert job.told[-1].endswith("before it was needed, the 5th within an hour; no more are started.")
    assert len(job.told) == 5
    dying.kill()
    dying.wait()
    job.next, job.ends = "time.sleep(3600)", False
    job.replacements.tick()
    assert job.started[-1] == (1, 9) and job.told[-1] == "starting another process in the place of rank 1."


def test_one_that_leaves_is_replaced_and_no_one_if_nobody_has_the_state(job):
    job.run("sys.exit(0)").wait()
    living = job.run("time.sleep(3600)")
    job.join(0, 0)
    job.join(1, 1)
    job.slots.leave(0)
    job.next = "os.kill(os.getpid(), 9)"
    job.replacements.tick()
    assert job.started == [(0, 4)]
    living.kill()
    living.wait()
    time.sleep(0.01)
    job.replacements.tick()
    assert job.started == [(0, 4)]
    assert job.supervisor.wait()[0] == 137


def test_added_ranks_take_the_slots_that_nobody_has_had(job):
    living = job.run("time.sleep(3600)")
    job.run("time.sleep(3600)")
    job.join(0, 0)
    job.join(1, 1)
    job.keep(1)
    job.replacements.tick()
    job.slots.wait_as_standby(4)
    job.replacements.follow([(2, 0), (3, 0)])
    job.next, job.ends = "time.sleep(3600)", False
    job.replacements.tick()
    assert job.started == [(None, 4), (3, 3), (None, 5)] and job.renamed == [(4, 2)]
    assert job.told == ["a standby process becomes rank 2.", "starting another process as rank 3."]
    assert job.replacements.is_out(2) and job.replacements.late == [2, 3] and job.replacements.added == []
    job.join(2, 4)
    job.supervisor.processes[3].kill()
    job.supervisor.processes[3].wait()
    job.replacements.tick()
    assert job.started[-1] == (None, 6) and job.renamed[-1] == (5, 3)
    job.join(3, 5)
    assert job.replacements.added == [2, 3] and job.replacements.filled == {} and job.replacements.late == []
    assert not job.replacements.is_out(3)
    living.kill()


def test_added_ranks_that_fail_before_they_join_end_the_wish_for_those_behind_them_too(job):
    job.run("time.sleep(3600)")
    job.run("time.sleep(3600)")
    job.join(0, 0)
    job.join(1, 1)
    job.replacements.follow([(2, 0)])
    for _ in range(4):
        job.replacements.tick()
    job.replacements.follow([(2, 0), (3, 0)])
    job.next, job.ends = "time.sleep(3600)", False
    job.replacements.tick()
    waiting = job.supervisor.processes[3]
    job.supervisor.processes[2].kill()
    job.supervisor.processes[2].wait()
    job.replacements.tick()
    assert [slot for slot, _ in job.started] == [2, 2, 2, 2, 2, 3]
    assert job.started[0] == (2, 2) and job.started[-1] == (3, 3)
    assert job.told[-1] == "rank 2 was started 5 times within an hour; the job goes on without it."
    assert waiting.poll() == -9 and len(job.supervisor.processes) == 2 and job.slots.in_use == 2
    assert job.replacements.given_back == [2]


def test_on_one_of_several_hosts_it_follows_the_list_of_added_slots(job):
    """Those by which processes have joined stay, and of the others those that are listed with the same attempt."""
    living = job.run("time.sleep(3600)")
    job.run("time.sleep(3600)")
    job.join(0, 2)
    job.join(1, 3)
    job.unused = iter(range(11, 20, 2))
    job.replacements = Replacements(job.supervisor, job.slots, [2, 3], 4, job.unused, job.start, job.told.append)
    job.supervisor.is_out = job.replacements.is_out
    job.next, job.ends = "time.sleep(3600)", False
    job.replacements.follow([(5, 0), (7, 0)])
    job.replacements.tick()
    assert job.started == [(2, 5), (3, 7)] and job.told[-1] == "starting another process as rank 7."
    job.join(2, 5)
    job.replacements.follow([])
    assert len(job.supervisor.processes) == 3 and job.replacements.names == [2, 3, 5]
    job.replacements.follow([(5, 0), (6, 1)])
    job.replacements.tick()
    assert job.started[2:] == [(3, 11)] and job.replacements.names == [2, 3, 5, 6] and job.replacements.late == [3]
    job.next = "os.kill(os.getpid(), 9)"
    for _ in range(5):
        job.supervisor.processes[-1].kill()
        job.supervisor.processes[-1].wait()
        job.replacements.tick()
    assert job.replacements.given_back == [6] and job.replacements.added == [2]
    assert job.told[-1] == "rank 6 was started 5 times within an hour; the job goes on without it."
    living.kill()
