"""Functions that are called when a work is done, on an executor without other ranks."""

import threading
import time

import pytest

from ring_plugins.core.base.errors import RingError
from ring_plugins.core.collectives import background
from ring_plugins.core.collectives.executor import SerialExecutor
from ring_plugins.core.collectives.fingerprint import fingerprint
from ring_plugins.core.control.wait import Wait

OPERATION = fingerprint("all_reduce", "float32", 3, "sum")


class Script:
    """One work with a callback, and what was run in which order."""

    def __init__(self, executor):
        self.executor, self.log, self.go = executor, [], threading.Event()

    def note(self, what):
        return lambda *_: self.log.append(what)

    def start_first(self, callback):
        gate = threading.Event()
        work = self.executor.start("first", lambda: (gate.wait(60), self.log.append("first")))
        ended = threading.Event()

        def call():
            try:
                callback()
            except RingError as error:
                self.log.append(str(error))
            ended.set()

        assert work.when_done(call)
        gate.set()
        return ended


@pytest.fixture
def script():
    executor = SerialExecutor("test", Wait("test", None))
    yield Script(executor)
    executor.close()
    end = time.monotonic() + 60
    while any(thread.name.startswith("ring:test") for thread in threading.enumerate()):
        assert time.monotonic() < end, "a thread is left"
        time.sleep(0.01)


def test_what_a_callback_starts_and_waits_for_comes_before_what_is_queued(script):
    def callback():
        script.go.wait(60)
        script.executor.run(OPERATION, script.note("blocking"))
        work = script.executor.start("inner", script.note("inner"))
        work.wait()
        assert not work.when_done(lambda: None)

    ended = script.start_first(callback)
    second = script.executor.start("second", script.note("second"))
    script.go.set()
    second.wait()
    assert ended.is_set() and script.log == ["first", "blocking", "inner", "second"]


def test_a_callback_may_wait_for_what_is_queued(script):
    works = []

    def callback():
        script.go.wait(60)
        works[0].wait()
        script.log.append("callback")

    ended = script.start_first(callback)
    works = [script.executor.start(name, script.note(name)) for name in ("second", "third")]
    script.go.set()
    works[1].wait()
    assert ended.is_set() and script.log == ["first", "second", "callback", "third"]


def test_a_work_is_done_before_its_callbacks(script):
    gate = threading.Event()
    work = script.executor.start("first", gate.wait)
    work.when_done(lambda: (script.go.wait(60), script.log.append("callback")))
    gate.set()
    work.wait()
    script.go.set()
    script.executor.start("second", script.note("second")).wait()
    assert script.log == ["callback", "second"]


def test_a_function_that_waits_for_a_work_behind_it_hears_so_at_once(script):
    works, gate = [], threading.Event()
    first = script.executor.start("first", lambda: (gate.wait(60), works[0].wait()))
    works.append(script.executor.start("second", lambda: None))
    gate.set()
    with pytest.raises(RingError, match="first waits for second, which the same thread runs behind it"):
        first.wait()
    with pytest.raises(RingError, match="second"):
        script.executor.run(OPERATION, script.note("never"))


def test_the_queue_goes_on_without_a_callback_that_waits_for_the_script(script, monkeypatch):
    monkeypatch.setattr(background, "_IDLE_CALLBACK", 0.1)
    monkeypatch.setattr(background, "_LOOK", 0.05)
    ended = script.start_first(lambda: script.go.wait(60))
    script.executor.start("second", script.note("second")).wait()
    assert not ended.is_set()
    script.go.set()
    assert ended.wait(60)
    script.executor.run(OPERATION, script.note("third"))
    assert script.log == ["first", "second", "third"]


def test_the_first_callback_that_holds_the_queue_is_told_with_its_place(script, monkeypatch):
    told = []
    monkeypatch.setattr(background, "_IDLE_CALLBACK", 0.1)
    monkeypatch.setattr(background, "_LOOK", 0.05)
    monkeypatch.setattr(background.logger, "warning", told.append)
    for _ in range(2):
        script.go.clear()
        ended = script.start_first(lambda: script.go.wait(60))
        script.executor.start("second", script.note("second")).wait()
        script.go.set()
        assert ended.wait(60)
    (text,) = told
    assert f"a callback of first has waited 0.1 s at {__file__}, line " in text and "Wait in the script instead" in text


@pytest.mark.parametrize("blocking", [True, False])
def test_an_operation_that_has_lost_its_place_breaks_the_communicator(script, blocking, monkeypatch):
    monkeypatch.setattr(background, "_IDLE_CALLBACK", 0.1)
    monkeypatch.setattr(background, "_LOOK", 0.05)

    def callback():
        script.go.wait(60)
        if blocking:
            script.executor.run(OPERATION, script.note("late"))
        else:
            script.executor.start("all_reduce", script.note("late"))

    ended = script.start_first(callback)
    script.executor.start("second", script.note("second")).wait()
    script.go.set()
    assert ended.wait(60)
    assert script.log[:2] == ["first", "second"]
    assert "all_reduce" in script.log[2] and "come at another place than on other ranks" in script.log[2]
    with pytest.raises(RingError, match="at another place"):
        script.executor.run(OPERATION, script.note("never"))


def test_a_work_that_the_caller_runs_has_nobody_who_calls_back_later():
    """Of one rank, and where lost ranks are replaced: a future must not wait for a thread that there is not."""
    work = background.BackgroundWork.run_now("all_reduce", lambda: 3, lambda *_: None)
    assert work.done() and work.wait() == 3
    assert not work.when_done(lambda: None)
