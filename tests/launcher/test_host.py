"""What a supervisor does with the ranks of its host, which are shells here, and tells the coordinator."""

import os
import signal
from types import SimpleNamespace

import pytest

from ring_plugins.launcher import host, processes
from ring_plugins.launcher.coordinator_link import HostJob
from ring_plugins.launcher.host import Supervisor
from ring_plugins.launcher.meeting import Meeting
from ring_plugins.launcher.processes import Processes


class Link:
    """A coordinator that starts the job at once, and ends it with a status when the supervisor has reported."""

    def __init__(self, status=0, starts=True, after_start=()):
        self.is_lost = self.is_orphaned = False
        self.sent, self.waiting, self.status, self.starts = [], [], status, starts
        self.after_start = after_start

    def send(self, kind, body):
        self.sent.append((kind, body))
        if kind == "here" and self.starts:
            self.waiting += [("start", {}), *self.after_start]
        if kind == "ended":
            self.waiting.append(("over", self.status))
            self.is_lost = self.status is None

    def read(self):
        return [self.waiting.pop(0)] if self.waiting and not self.is_lost else []

    def of(self, kind):
        return [body for found, body in self.sent if found == kind]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.2)
    meetings = []

    def run(link, *scripts, **options):
        """Run one shell script as each rank, with its slot as `$slot`."""
        choose = "".join(f"{rank}) {script};; " for rank, script in enumerate(scripts))
        command = ["sh", "-c", f'slot=$LOCAL_RANK; case "$slot" in {choose} esac']
        job = HostJob([], 0, "", 0, 1, range(len(scripts)), len(scripts), command, **options)
        meetings.append(meeting := Meeting(job, in_memory=True))
        with Processes() as group:
            return Supervisor(job, link, group, meeting).run()

    yield run
    for meeting in meetings:
        meeting.segment.close_file()


def test_ranks_that_end_normally_are_reported_and_the_coordinator_says_the_status(run):
    link = Link(status=7)
    assert run(link, "exit 0", "exit 0") == 7
    (ended,) = link.of("ended")
    assert sorted(tuple(end) for end in ended["ranks"]) == [(0, 0, "", False), (1, 0, "", False)]
    assert ended["why"] is None and ended["replaced"] == [] and not link.of("failed")


def test_a_failure_is_told_once_and_the_others_end_with_it(run):
    link = Link(status=3)
    assert run(link, "exec sleep 3600", "exit 3", recovers=False) == 3
    (failed,) = link.of("failed")
    assert [tuple(end) for end in failed["ranks"]] == [(1, 3, "failed", False)] and failed["why"] is None
    (ended,) = link.of("ended")
    assert [tuple(end)[:3] for end in ended["ranks"]] == [(1, 3, "failed"), (0, -signal.SIGKILL, "followed")]


def test_others_go_on_without_a_killed_rank_if_losses_are_tolerated(run):
    link = Link()
    assert run(link, "sleep 0.3", "kill -9 $$") == 0
    assert not link.of("failed") and [tuple(end)[:3] for end in link.of("ended")[0]["ranks"]] == [
        (1, -signal.SIGKILL, ""),
        (0, 0, ""),
    ]


def test_without_the_coordinator_the_ends_of_this_host_decide(run):
    assert run(Link(status=None), "exit 0", "kill -9 $$") == 0
    assert run(Link(status=None), "kill -9 $$") == 128 + signal.SIGKILL
    assert run(Link(status=None), "exit 0", "exit 5") == 5


def test_a_coordinator_that_is_gone_before_the_start_starts_nothing(run):
    link = Link(starts=False)
    link.is_lost = True
    assert run(link, "exit 0") == 1 and not link.of("ended")


def test_a_coordinator_that_has_ended_ends_the_ranks(run):
    link = Link()
    link.is_orphaned = True
    assert run(link, "exec sleep 3600") == 128 + signal.SIGTERM
    assert link.of("ended")[0]["ranks"][0][1] == -signal.SIGTERM


def test_the_end_that_the_coordinator_asks_for_reaches_the_ranks(run):
    link = Link(status=130, after_start=[("end", int(signal.SIGTERM))])
    assert run(link, "exec sleep 3600") == 128 + signal.SIGTERM
    assert link.of("ended")[0]["ranks"][0][1] == -signal.SIGTERM


def test_what_is_printed_after_the_login_is_lost_is_dropped():
    link = SimpleNamespace(is_lost=True)
    reading, writing = os.pipe()
    outlet = host._Outlet(writing, link)
    outlet.write("x" * (1 << 20))  # more than the pipe holds, and nobody reads
    assert len(os.read(reading, 1 << 20)) >= 4096
    os.close(reading)
    host._Outlet(writing, link).write("nobody reads")
    os.close(writing)
