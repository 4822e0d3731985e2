import itertools

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.launcher import standbys
from ring_plugins.launcher.standbys import Standbys


class Process:
    """One that runs until its status is set."""

    def __init__(self, pid):
        self.pid, self.status = pid, None

    def poll(self):
        return self.status


class Supervisor:
    def __init__(self):
        self.standbys, self.taken = [], []

    def slot_standby(self, process, slot):
        self.standbys.remove(process)
        self.taken.append((process.pid, slot))


class Slots:
    def __init__(self):
        self.come, self.given = set(), []

    def has_come(self, world_rank):
        return world_rank in self.come

    def give(self, slot, world_rank):
        self.given.append((slot, world_rank))


class Job:
    """A job of three ranks; a standby's process id is 100 more than its world rank."""

    def __init__(self, wanted, world_ranks=None):
        self.supervisor, self.slots, self.told, self.renamed = Supervisor(), Slots(), [], []
        self.started, self.error, self.stopped = {}, None, set()
        numbers = iter(world_ranks) if world_ranks is not None else itertools.count(3)
        self.standbys = Standbys(
            self.supervisor, self.slots, wanted, numbers, self.start, lambda *ranks: self.renamed.append(ranks)
        )

    def start(self, world_rank):
        if self.error is not None:
            raise self.error
        process = self.started[world_rank] = Process(100 + world_rank)
        self.supervisor.standbys.append(process)
        return process

    def fill_up(self):
        self.standbys.fill_up(self.told.append)


@pytest.fixture(autouse=True)
def _every_process_runs(monkeypatch):
    monkeypatch.setattr(standbys, "state", lambda pid: "S")


def test_one_that_waits_already_gets_the_slot():
    job = Job(2)
    job.fill_up()
    job.slots.come.add(4)
    assert job.standbys.take(1) == 4
    assert job.slots.given == [(1, 4)] and job.supervisor.taken == [(104, 1)] and job.renamed == [(4, 1)]
    assert job.standbys.take(2) == 3  # which is still starting
    assert job.standbys.take(0) is None


def test_one_that_has_ended_or_is_stopped_gets_no_slot(monkeypatch):
    job = Job(2)
    job.fill_up()
    job.started[3].status = -9
    monkeypatch.setattr(standbys, "state", lambda pid: "T" if pid == 104 else "S")
    assert job.standbys.take(1) is None and job.slots.given == []


def test_those_that_are_used_or_end_are_replaced():
    job = Job(1)
    job.fill_up()
    assert job.standbys.take(1) == 3
    job.fill_up()
    job.started[4].status = -9
    job.fill_up()
    assert list(job.started) == [3, 4, 5]
    assert job.told == ["a standby process was killed by SIGKILL (out of memory? `kill -9`?) before it was needed."]
    assert job.supervisor.standbys == [job.started[5]]


def test_after_five_ends_within_an_hour_no_more_are_started(monkeypatch):
    job, now = Job(1), 0.0
    monkeypatch.setattr(standbys.time, "monotonic", lambda: now)
    job.fill_up()
    for now in (0.0, 4000.0, 4001.0, 4002.0, 4003.0, 4004.0):  # noqa: B007 - the clock reads it
        list(job.started.values())[-1].status = 0
        job.fill_up()
    assert len(job.started) == 6
    assert job.told[-2:] == [
        "a standby process ended before it was needed.",
        "a standby process ended before it was needed, the 5th within an hour; no more are started.",
    ]


def test_one_that_cannot_be_started_is_told_and_counts():
    job = Job(1)
    job.error = LaunchError("no memory")
    job.fill_up()
    assert job.told[0] == "a standby process could not be started: no memory."
    assert len(job.told) == 5 and job.told[-1].endswith("the 5th within an hour; no more are started.")


def test_no_more_are_started_than_there_are_world_ranks():
    job = Job(3, [3, 4])
    job.fill_up()
    assert list(job.started) == [3, 4] and job.told == []
