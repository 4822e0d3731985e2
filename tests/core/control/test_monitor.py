"""The monitor thread, with a fake end of the process."""

import time

import pytest

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control import monitor as module
from ring_plugins.core.control.monitor import MonitorThread


class FakeChannel:
    def __init__(self):
        self.closed = False

    def poll(self, seconds):
        time.sleep(0.001)

    def wake(self):
        pass

    def close(self):
        self.closed = True


class FakeDetector:
    members = Members(1, [Member(rank, rank, "a", 0, "a") for rank in range(2)])
    rank, aborted, has_raised, failed = 1, False, False, False

    def __init__(self, error=None):
        self.error, self.reported = error, []

    def failure(self):
        return self.error

    def has_lost_a_process(self):
        return True

    def forward_departures(self):
        pass

    def fail(self, error):
        self.reported.append(error)


class Service:
    def __init__(self, error=None):
        self.ticks, self.closed, self.error = 0, False, error

    def tick(self, now):
        self.ticks += 1
        if self.error is not None:
            raise self.error

    def close(self):
        self.closed = True


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def run(monkeypatch):
    """Runs a monitor in this thread until it ends the process, and returns the exit status."""
    monkeypatch.setattr(module, "_GRACE", 0.01)

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(module.os, "_exit", end)

    def run(monitor):
        with pytest.raises(Ended) as ended:
            monitor._run()
        return ended.value.args[0]

    return run


def test_a_service_that_raises_is_dropped_and_the_others_go_on():
    monitor = MonitorThread(FakeDetector(), channel := FakeChannel(), False, lambda status: None, lambda failure: 1)
    good, bad = Service(), Service(RuntimeError("broken"))
    monitor.add(bad)
    monitor.add(good)
    monitor.start()
    while good.ticks < 3:
        time.sleep(0.001)
    monitor.close()
    assert bad.ticks == 1
    assert good.closed and channel.closed and not bad.closed


def test_a_script_that_does_not_notice_a_failure_is_ended_and_the_job_with_it(run):
    detector, aborted, service = FakeDetector(failure := PeerFailed("rank 0 failed", 0)), [], Service()
    monitor = MonitorThread(detector, FakeChannel(), False, aborted.append, lambda failure: 3)
    monitor.add(service)
    assert run(monitor) == 3
    assert detector.reported == [failure] and aborted == [3] and service.closed


def test_a_script_that_noticed_is_left_alone():
    detector = FakeDetector(PeerFailed("rank 0 failed", 0))
    detector.aborted = True
    monitor = MonitorThread(detector, FakeChannel(), False, lambda status: None, lambda failure: 1)
    for _ in range(3):
        monitor._end_after_failure()
    assert detector.reported == []


def test_a_process_whose_launcher_is_gone_ends(run, monkeypatch):
    monkeypatch.setattr(module.os, "getppid", lambda: 4711)
    monitor = MonitorThread(FakeDetector(), FakeChannel(), True, lambda status: None, lambda failure: 1)
    monkeypatch.setattr(module.os, "getppid", lambda: 1)
    assert run(monitor) == 1


@pytest.mark.parametrize("told", [False, True])
def test_a_script_that_takes_too_long_to_say_that_rank_0_is_gone_is_ended_with_the_reason(
    told, run, monkeypatch, caplog
):
    monkeypatch.setattr(module.logger, "propagate", True)
    monkeypatch.setattr(module.os, "getppid", lambda: FakeDetector.members.known[0].pid)
    detector = FakeDetector(PeerFailed("rank 0 died", 0))
    detector.aborted, detector.failed = True, told
    monitor = MonitorThread(detector, FakeChannel(), True, lambda status: None, lambda failure: 1)
    monitor._parent = 4711
    assert run(monitor) == 1
    assert ("rank 1 ends because rank 0 died" in caplog.text) is not told
