"""Threads of launchers, and abort threads: each tells of its death, in one process."""

import contextlib
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from ring_plugins.core import exit_hooks
from ring_plugins.core.base import threads
from ring_plugins.core.control import monitor
from ring_plugins.core.gpu.connection import NcclConnection
from ring_plugins.launcher import function, job, mpirun, preflight
from ring_plugins.launcher.hosts import Share
from ring_plugins.launcher.launch_plan import LaunchPlan
from ring_plugins.launcher.mpirun import JobSpec, Mpirun
from ring_plugins.launcher.output import Relay


def broken(*_, **__):
    raise ZeroDivisionError("a bug here")


@pytest.fixture
def died(monkeypatch):
    """The threads that died, by name; `seen` is set at the first. Nothing is a job's, so owners are told."""
    names, seen = [], threading.Event()

    def on_death(name, error):
        assert isinstance(error, ZeroDivisionError)
        names.append(name)
        seen.set()
        return False

    monkeypatch.setattr(threads, "_on_death", on_death)
    return SimpleNamespace(names=names, seen=seen)


def test_a_dead_output_thread_closes_its_ranks_pipe(died, monkeypatch):
    with Relay(tag=True) as relay:
        out = os.dup(relay.files(0)[0])
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=broken, flush=broken))
        relay.start()
        os.write(out, b"text\n")
        assert died.seen.wait(10)
        relay._threads[0].join(10)
        with pytest.raises(BrokenPipeError):
            os.write(out, b"more\n")
        os.close(out)
    assert died.names == ["ring:output 0"]


def test_a_rank_whose_driver_thread_dies_ends(died, monkeypatch):
    ended = threading.Event()
    driver = SimpleNamespace(receive_call=lambda: b"[]\n", wait_for_end=broken, report=lambda outcome: None)
    monkeypatch.setenv(function.config.DRIVER.name, "here 1 00")
    monkeypatch.setattr(function, "detect", lambda: SimpleNamespace(rank=0))
    monkeypatch.setattr(function, "connect_to_driver", lambda *_: driver)
    monkeypatch.setattr(function, "call", lambda *_: SimpleNamespace(failure=ended.wait(10) or None))
    monkeypatch.setattr(function, "_end", ended.set)
    with pytest.raises(SystemExit):
        function.run_rank()
    assert ended.is_set() and died.names == ["ring:driver"]


def test_a_job_whose_mpirun_nobody_hears_ends(died, monkeypatch, tmp_path):
    script = tmp_path / "mpirun"
    script.write_text("#!/bin/sh\necho a line >&2\nexec sleep 30\n")
    script.chmod(0o755)
    own = SimpleNamespace(pipe=os.pipe, close=os.close, fdopen=os.fdopen, environ=os.environ, write=broken)
    monkeypatch.setattr(mpirun, "os", own)
    plan = LaunchPlan(
        JobSpec(("/bin/true",), 2, shares=(Share("a", 1), Share("b", 1))), Mpirun(str(script), "Open MPI", "5.0.11")
    )
    lines: list[str] = []
    assert job.run(plan, lines.append) != 0
    assert died.names == ["ring:mpirun's errors"]
    assert lines == ["ended every rank because the thread that reads mpirun's errors died; its traceback is above."]


def test_a_dead_preflight_thread_is_told(died, monkeypatch):
    monkeypatch.setattr(preflight.Acceptor, "poll", broken)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preflight._listening(1))
        assert died.seen.wait(10)
    assert died.names == ["ring:preflight"]


def test_a_dead_abort_thread_of_a_gpu_is_told(died):
    connection = SimpleNamespace(_name="gradients", _driver=SimpleNamespace(device=broken), _device=0, _aborting=None)
    NcclConnection._start_abort(connection, None)
    connection._aborting.join(10)
    assert died.names == ["ring:abort gradients"]


def test_a_dead_abort_thread_of_the_monitor_is_told(died, monkeypatch):
    monkeypatch.setattr(monitor, "_GRACE", -1.0)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    detector = SimpleNamespace(failure=lambda: "rank 1 died", aborted=False, failed=False, fail=lambda _: None, rank=0)
    thread = SimpleNamespace(
        _failure_detector=detector,
        _end_at=0.0,
        _closed=threading.Event(),
        _call=lambda _: None,
        _abort=broken,
        _status_after=lambda failure: 1,
    )
    monitor.MonitorThread._end_after_failure(thread)
    assert died.seen.wait(10) and died.names == ["ring:abort"]


def test_an_abort_that_raises_is_tried_once_and_the_process_ends(monkeypatch):
    aborts, ends, told = [], [], []

    def abort():
        aborts.append(True)
        if len(aborts) < 10:
            broken()

    job = SimpleNamespace(
        topology=SimpleNamespace(rank=0),
        world_rank=0,
        is_mine=lambda: True,
        fail=lambda error: told.append(str(error)),
        abort=abort,
    )
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(exit_hooks, "_ABORT", 10.0)
    monkeypatch.setattr(threads, "_on_death", lambda name, error: exit_hooks._end_with_thread(job, name, error))
    threads.HelperThread(broken, "ring:monitor").run()
    assert (len(aborts), set(ends)) == (1, {1})
    assert told[0].startswith("its thread ring:monitor died: ZeroDivisionError: a bug here")
