"""Which seats `ring run` fills again, with processes that say in the seats what ranks would say."""

import os
import sys
import time

import numpy as np
import pytest

from ring_plugins.core.rendezvous.seats import ROW, Occupant, Seats
from ring_plugins.launcher.replacements import Replacements
from ring_plugins.launcher.supervision import Supervisor


class Job:
    """Two seats; processes end as told, and `start` starts another that ends so."""

    def __init__(self, supervisor):
        self.supervisor, self.seats, self.told, self.started = supervisor, Seats(np.zeros(2 * ROW, np.uint8)), [], []
        self.next, self.ends = "sys.exit(1)", True
        self.replacements = Replacements(supervisor, self.seats, 2, self.start, self.told.append)
        supervisor.is_out = self.replacements.is_out

    def run(self, code, index=None):
        return self.supervisor.start([sys.executable, "-c", f"import os, sys, time; {code}"], os.environ, index=index)

    def start(self, seat, world_rank):
        self.started.append((seat, world_rank))
        process = self.run(self.next, seat)
        if self.ends:
            process.wait()

    def join(self, seat, world_rank):
        self.seats.take(Occupant(seat, world_rank, (1, 2, 3)), as_member=True)


@pytest.fixture
def job():
    with Supervisor(tolerates_losses=True) as supervisor:
        yield Job(supervisor)


def test_a_seat_is_filled_until_it_has_failed_too_often(job):
    living = job.run("time.sleep(3600)")
    job.run("os.kill(os.getpid(), 9)").wait()
    job.join(0, 0)
    job.replacements.tick()
    assert not job.started  # it died before the ranks were connected, which the launcher reports
    job.join(1, 1)
    for _ in range(8):
        job.replacements.tick()
    assert job.started == [(1, 2), (1, 3), (1, 4), (1, 5), (1, 6)]
    assert job.replacements.filled == {1: 5} and job.replacements.is_out(1) and not job.replacements.is_out(0)
    assert job.told[-1] == "rank 1 was replaced 5 times within an hour; the job goes on without it."
    living.kill()


@pytest.mark.parametrize("code", ["sys.exit(0)", "sys.exit(3)"])
def test_one_that_ends_normally_or_fails_is_not_replaced(job, code):
    job.run("time.sleep(3600)")
    job.run(code).wait()
    job.join(0, 0)
    job.join(1, 1)
    job.replacements.tick()
    assert not job.started


def test_one_that_has_not_joined_when_the_others_end_is_killed(job):
    living = job.run("time.sleep(3600)")
    job.run("os.kill(os.getpid(), 9)").wait()
    job.join(0, 0)
    job.join(1, 1)
    job.next, job.ends = "time.sleep(3600)", False
    job.replacements.tick()
    newcomer = job.supervisor.processes[1]
    job.replacements.tick()
    assert newcomer.poll() is None
    living.kill()
    living.wait()
    job.replacements.tick()
    assert newcomer.wait(10) == -9


def test_one_that_leaves_is_replaced_and_no_one_if_nobody_has_the_state(job):
    job.run("sys.exit(0)").wait()
    living = job.run("time.sleep(3600)")
    job.join(0, 0)
    job.join(1, 1)
    job.seats.leave(0)
    job.next = "os.kill(os.getpid(), 9)"
    job.replacements.tick()
    assert job.started == [(0, 2)]
    living.kill()
    living.wait()
    time.sleep(0.01)
    job.replacements.tick()
    assert job.started == [(0, 2)]
    assert job.supervisor.wait()[0] == 137
