"""What an uncaught exception reports to the other ranks."""

import logging
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from ring_plugins.core import exit_hooks
from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.control.failure_detector import summary
from ring_plugins.core.control.wait import PeerRejected


class Job:
    """A rank of two, which records the calls."""

    def __init__(self, failure=None, aborted=True, rank=1, failed=False):
        self.topology, self.world_rank = SimpleNamespace(rank=rank, size=2), rank
        facts = SimpleNamespace(has_lost_the_network=False)
        self.failure_detector = SimpleNamespace(aborted=aborted, failed=failed, facts=facts, failure=lambda: failure)
        self.calls = []

    def is_mine(self):
        return True

    def fail(self, error):
        self.calls.append(error)

    def leave(self, status):
        """Has been told."""

    def status_after(self, error):
        return 3 if isinstance(error, PeerFailed) else 1

    def abort(self, status=1):
        self.calls.append(f"abort with {status}")

    def close(self):
        """Has been closed."""


@pytest.fixture
def uncaught(monkeypatch):
    """Installs the hook for a job and passes an exception to it; restores everything."""
    shown = []
    monkeypatch.setattr(exit_hooks, "_installed", False)
    monkeypatch.setattr(exit_hooks, "_failed", False)
    monkeypatch.setattr(exit_hooks, "_followed", 0)
    monkeypatch.setattr(exit_hooks, "_told", False)
    monkeypatch.setattr(exit_hooks, "_AFTER_PEER", 0.0)
    monkeypatch.setattr(exit_hooks, "_PRINTING", 0.0)
    monkeypatch.setattr(exit_hooks.atexit, "register", lambda *_: None)
    monkeypatch.setattr(exit_hooks.os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(os, "_exit", os._exit)
    monkeypatch.setattr(exit_hooks, "set_on_death", lambda handler: None)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))

    def uncaught(job, error):
        exit_hooks.install(lambda: job, lambda: None)
        sys.excepthook(type(error), error, None)
        return shown

    return uncaught


def test_an_error_of_this_rank_is_shown_and_reported_and_ends_the_job(uncaught, capsys):
    job, error = Job(), ValueError("no data")
    assert uncaught(job, error) == [error]
    assert job.calls == [error, "abort with 1"]
    assert "ring_plugins: rank 1 failed:" in capsys.readouterr().err


def test_an_error_without_a_text_ends_the_job_as_any_other(uncaught):
    class Textless(Exception):
        def __str__(self):
            raise ValueError("no text")

    job, error = Job(), Textless()
    assert uncaught(job, error) == [error]
    assert job.calls == [error, "abort with 1"]


def test_what_a_signal_handler_raises_meanwhile_hides_no_failure(uncaught, monkeypatch):
    """A data loader's handler for SIGCHLD raises, for example. It may interrupt the hook, or what tells the others."""

    def interrupt(*_):
        raise RuntimeError("DataLoader worker exited unexpectedly")

    monkeypatch.setattr(sys, "excepthook", interrupt)  # called by ours, to show the error
    job, error = Job(), ValueError("no data")
    tell = job.fail

    def fail(error):
        os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.05)
        tell(error)

    job.fail, before = fail, signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(RuntimeError, match="DataLoader"):  # Python shows both
            uncaught(job, error)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert job.calls == [error]


@pytest.mark.parametrize("told", [False, True])
def test_a_failure_that_the_hook_could_not_tell_is_told_at_exit(monkeypatch, told):
    job, error = Job(), ValueError("no data")
    monkeypatch.setattr(exit_hooks, "_failed", False)
    monkeypatch.setattr(exit_hooks, "_told", told)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(exit_hooks.spawn, "wait_for_children", lambda failed: 0)
    exit_hooks._at_exit(lambda: job, lambda: None)
    assert job.calls == ([] if told else [error, "abort with 1"])


@pytest.mark.parametrize(("status", "is_failure"), [(3, True), (256 + 3, True), (-1, True), (0, False), (137, False)])
def test_the_others_are_told_of_a_failure_by_os_exit(status, is_failure):
    """Above 128 are the statuses by which a shell tells that its command was killed."""
    job, left = Job(), []
    exit_hooks._telling_exit(left.append, lambda: job)(status)
    assert left == [status] and len(job.calls) == is_failure
    if is_failure:
        text = f"rank 1 (process {os.getpid()}) ended with exit status {status % 256} without an exception: it called"
        assert str(job.calls[0]).startswith(text) and job.calls[0].rank == 1


def test_a_peers_failure_is_one_line_without_a_traceback(uncaught, capsys):
    job, error = Job(), PeerFailed("rank 0 failed: out of memory", 0)
    assert uncaught(job, error) == []
    assert job.calls == [error, "abort with 3"]
    assert "rank 1 ends because rank 0 failed: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "failed", "shows"),
    [(0, False, False), (1, False, False), (0, True, True), (1, True, False)],
    ids=["relies on 1", "relies on 0", "1 may rely on it", "relies on 0 though it has reported"],
)
def test_one_of_two_ranks_with_the_same_error_shows_it(uncaught, rank, failed, shows):
    """Also where both have reported it before either has printed it, as under Lightning."""
    error = ValueError("no data")
    other = 1 - rank
    job = Job(PeerFailed(f"rank {other} failed: {summary(error)}", other), aborted=False, rank=rank, failed=failed)
    assert uncaught(job, error) == ([error] if shows else [])


def test_a_peers_failure_is_shown_as_an_exception_if_the_logger_is_silenced(uncaught, monkeypatch):
    monkeypatch.setattr(exit_hooks.logger, "level", logging.CRITICAL + 1)
    exit_hooks.logger.manager._clear_cache()
    try:
        error = PeerFailed("rank 0 failed: out of memory", 0)
        assert uncaught(Job(), error) == [error]
    finally:
        exit_hooks.logger.manager._clear_cache()


def test_buffered_log_records_are_written_before_the_process_ends_with_a_childs_status(monkeypatch):
    calls = []
    monkeypatch.setattr(exit_hooks.spawn, "wait_for_children", lambda failed: 3)
    monkeypatch.setattr(exit_hooks, "_failed", False)
    monkeypatch.setattr(exit_hooks.logging, "shutdown", lambda: calls.append("logs written"))
    monkeypatch.setattr(exit_hooks.os, "_exit", calls.append)
    exit_hooks._at_exit(lambda: None, lambda: None)
    assert calls == ["logs written", 3]


@pytest.mark.parametrize(("error", "statuses"), [(PeerFailed("rank 1 failed", 1), [3]), (ValueError("no data"), [])])
def test_a_first_process_that_a_child_made_fail_ends_with_the_childs_status(uncaught, monkeypatch, error, statuses):
    """Otherwise with that of Python, for an exception of its own."""
    job, ends = Job(rank=0), []
    uncaught(job, error)
    monkeypatch.setattr(exit_hooks.spawn, "wait_for_children", lambda failed: 137)  # it had to be killed
    monkeypatch.setattr(exit_hooks.logging, "shutdown", lambda: None)
    monkeypatch.setattr(exit_hooks.os, "_exit", ends.append)
    job.operations = lambda: 0
    exit_hooks._at_exit(lambda: job, lambda: None)
    assert ends == statuses


@pytest.mark.parametrize(("of_the_others", "status"), [(0, 130), (143, 143)])
def test_ctrl_c_while_the_first_process_waits_for_the_others_ends_it_with_a_status(monkeypatch, of_the_others, status):
    calls = []

    def wait(failed):
        calls.append(failed)
        if not failed:
            raise KeyboardInterrupt
        return of_the_others

    monkeypatch.setattr(exit_hooks.spawn, "wait_for_children", wait)
    monkeypatch.setattr(exit_hooks, "_failed", False)
    monkeypatch.setattr(exit_hooks.logging, "shutdown", lambda: None)
    monkeypatch.setattr(exit_hooks.os, "_exit", calls.append)
    exit_hooks._at_exit(lambda: None, lambda: None)
    assert calls == [False, True, status]


@pytest.mark.parametrize(
    ("given", "operations", "told"),
    [((3,), 7, [3]), (("no data",), 7, [1]), ((), 7, []), ((0,), 7, []), ((3,), 8, [])],
)
def test_the_status_of_sys_exit_is_told_unless_the_script_caught_it(monkeypatch, given, operations, told):
    def leave(*status):
        raise SystemExit(*status)  # as sys.exit does, which an earlier test may have wrapped already

    statuses, job = [], Job()
    job.operations, job.leave = lambda: 7, statuses.append
    monkeypatch.setattr(exit_hooks, "_exit", (0, 0))
    monkeypatch.setattr(exit_hooks, "_failed", False)
    monkeypatch.setattr(exit_hooks.spawn, "wait_for_children", lambda failed: 0)
    with pytest.raises(SystemExit) as ended:
        exit_hooks._noting_exit(leave, lambda: job)(*given)
    assert ended.value.args == given
    job.operations = lambda: operations  # more of them than at the time of the call: the script has gone on
    exit_hooks._at_exit(lambda: job, lambda: None)
    assert statuses == told


def test_without_other_ranks_the_hook_only_shows_the_error(uncaught):
    job, error = Job(), ValueError("no data")
    job.topology.size = 1
    assert uncaught(job, error) == [error] and job.calls == []


def test_a_rank_that_rejected_an_operation_and_left_with_a_status_is_the_cause():
    """As one does that calls sys.exit in the middle of Keras' fit."""
    job = Job()
    job.failure_detector.exited = lambda: {0: 3}
    cause = exit_hooks.consequence(job, PeerRejected("rank 0 could not take part in the next step"))
    assert str(cause) == "rank 0 ended with exit status 3 (sys.exit)." and cause.rank == 0


def test_a_peers_failure_is_found_inside_a_frameworks_error():
    failure = PeerFailed("rank 0 failed", 0)
    wrapped = RuntimeError("in torch: PeerFailed: rank 0 failed")
    assert exit_hooks.consequence(Job(failure), wrapped) is failure
    assert exit_hooks.consequence(Job(failure, aborted=False), wrapped) is None
    assert exit_hooks.consequence(Job(failure), RuntimeError("something else")) is None
