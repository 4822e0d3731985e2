"""The executor on which two members meet, without other ranks."""

import threading
import time

import pytest

from ring_plugins.core.base.errors import RingError
from ring_plugins.core.collectives.background import QueueThread
from ring_plugins.core.collectives.fingerprint import fingerprint
from ring_plugins.core.collectives.pair_executor import PairExecutor
from ring_plugins.core.control.wait import Wait

OPERATION = fingerprint("send/recv", "float32", 3, "tag 0")


def thread_name():
    return threading.current_thread().name


def test_a_caller_that_waits_for_the_only_work_runs_it_itself_and_no_other_runs_meanwhile(monkeypatch):
    gate, perform, log = threading.Event(), QueueThread._perform, []

    def late(thread, work):
        gate.wait(60)
        perform(thread, work)

    monkeypatch.setattr(QueueThread, "_perform", late)
    executor = PairExecutor("test", Wait("test", None), callers_run=True)

    def first():
        gate.set()  # the thread comes to the second work only once this one is over
        second.append(executor.start("second", lambda: log.append(thread_name())))
        time.sleep(0.05)
        log.append(executor.run(OPERATION, lambda operation: thread_name()))

    second = []
    executor.start("first", first).wait()
    second[0].wait()
    assert log == [threading.current_thread().name, "ring:test"]
    with pytest.raises(ZeroDivisionError):
        executor.start("third", lambda: 1 // 0).wait()
    executor.finish(60)
    executor.close()


def test_members_meet_on_the_thread_of_an_executor_before_it_knows_them():
    executor = PairExecutor("test", Wait("test", None), callers_run=False)
    looks = iter([False, False, True])
    told = []

    class Others:
        def tell(self, operation, cause):
            told.append(operation)

        def withdraw(self, operation, cause):
            told.append("withdrawn")

    def connect():
        executor.meet(lambda: next(looks), lambda: [1], time.sleep)
        executor.connect(7, None, Others())
        assert executor.wait.identity == "test #7"

    executor.start("connect", connect).wait()
    executor.interrupt("a message", KeyboardInterrupt())
    assert told == ["a message", "withdrawn"]
    with pytest.raises(RingError, match="test was interrupted in a message by KeyboardInterrupt"):
        executor.failure.check()
    executor.close()
