import gc
import signal
import threading
import time
import weakref

import pytest

from ring_plugins.core.base.errors import ArgumentError, MembersLost, PeerFailed, RingError
from ring_plugins.core.collectives.executor import SerialExecutor
from ring_plugins.core.collectives.fingerprint import fingerprint, for_purpose, purpose
from ring_plugins.core.collectives.recovery import JobRecovery, Recovery
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.trace.steps import steps

OPERATION = fingerprint("all_reduce", "float32", 3, "sum")


@pytest.fixture
def executor():
    made = SerialExecutor("test", Wait("test", None))
    yield made
    made.close()


def thread_name(_):
    return threading.current_thread().name


def test_an_operation_gets_its_arguments_and_the_fingerprint(executor):
    assert executor.run(OPERATION, lambda a, b, operation: (a, b, operation), 1, 2) == (1, 2, OPERATION)


def test_an_idle_executor_runs_in_the_callers_thread(executor):
    assert executor.run(OPERATION, thread_name) == threading.current_thread().name
    executor.start("nothing", lambda: None).wait()
    while executor._thread is not None and executor._thread.unfinished:
        time.sleep(0.001)
    assert executor.run(OPERATION, thread_name) == threading.current_thread().name


@pytest.mark.parametrize("way", ["run", "behind", "start"])
def test_an_operation_with_a_purpose_never_matches_one_without(executor, way):
    release = threading.Event()
    if way == "behind":
        executor.start("first", release.wait)
        threading.Timer(0.05, release.set).start()
    with purpose("check of weights"):
        if way == "start":
            found = executor.start("text", lambda: executor.run(OPERATION, lambda operation: operation)).wait()
        else:
            found = executor.run(OPERATION, lambda operation: operation)
    assert found == for_purpose(OPERATION, "check of weights")
    assert executor.run(OPERATION, lambda operation: operation) == OPERATION


def test_a_busy_executor_runs_it_after_what_was_started_before(executor):
    log, gate = [], threading.Event()
    executor.start("first", lambda: (gate.wait(60), log.append("first")))

    def let_go_once_the_second_waits():
        while executor._thread.unfinished < 2:
            time.sleep(0.001)
        gate.set()

    threading.Thread(target=let_go_once_the_second_waits, daemon=True).start()
    executor.run(OPERATION, lambda operation: log.append(threading.current_thread().name))
    assert log == ["first", "ring:test"]


def test_a_started_function_runs_its_operations_at_once_on_the_executors_thread(executor):
    work = executor.start("bucket 0", lambda: executor.run(OPERATION, thread_name))
    assert work.wait() == "ring:test"
    assert work.done()
    activity = executor.activity()
    assert (activity.operation, activity.part_of) == (OPERATION.text, "bucket 0")
    assert activity.ended >= activity.began > 0


def test_a_function_run_synchronously_runs_its_operations_in_the_callers_thread_as_parts_of_it(executor):
    assert executor.run_synchronously("bucket 0", lambda: executor.run(OPERATION, thread_name)) == "MainThread"
    assert executor._thread is None
    assert executor.activity().part_of == "bucket 0"
    executor.run(OPERATION, thread_name)
    assert executor.activity().part_of == ""


def test_a_function_run_synchronously_waits_for_what_was_started_before(executor):
    log, gate = [], threading.Event()
    executor.start("first", lambda: (gate.wait(5), log.append("first")))
    threading.Timer(0.05, gate.set).start()
    executor.run_synchronously("second", lambda: log.append(thread_name(None)))
    assert log == ["first", "ring:test"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ArgumentError])
def test_any_exception_synchronously_breaks_the_communicator(executor, error):
    def interrupt():
        executor.run(OPERATION, thread_name)
        raise error("between two operations")

    with pytest.raises(error):
        executor.run_synchronously("bucket 0", interrupt)
    with pytest.raises(RingError):
        executor.run(OPERATION, thread_name)
    assert executor._synchronous == ""


def test_time_run_synchronously_blocks_the_script_once(executor):
    before = steps.waiting + steps.moving
    executor.run_synchronously("bucket 0", lambda: executor.run(OPERATION, lambda operation: time.sleep(0.3)))
    blocked = steps.waiting + steps.moving - before
    activity = executor.activity()
    assert activity.ended - activity.began <= blocked < 2 * (activity.ended - activity.began)


def test_an_operation_under_way_has_not_ended(executor):
    seen = executor.run(OPERATION, lambda operation: executor.activity())
    assert seen.ended == 0.0
    assert seen.number == 0


def test_an_error_reaches_the_caller_and_every_later_call(executor):
    def fail(operation):
        raise PeerFailed("rank 1 is gone", 1)

    with pytest.raises(PeerFailed):
        executor.start("bucket 0", lambda: executor.run(OPERATION, fail)).wait()
    with pytest.raises(PeerFailed):
        executor.run(OPERATION, thread_name)


def test_an_interrupted_operation_leaves_the_rank_out_of_step(executor):
    def interrupt(operation):
        executor.wait.begun = True
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor.run(OPERATION, interrupt)
    with pytest.raises(RingError, match=r"interrupted in all_reduce.* by KeyboardInterrupt"):
        executor.run(OPERATION, thread_name)


def test_a_signal_that_another_thread_receives_ends_the_wait_for_a_work(executor):
    """It does not wake the main thread, as one does not that arrives just before the thread blocks."""

    def signal_this_thread():
        time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, lambda number, frame: (_ for _ in ()).throw(KeyboardInterrupt))
    ended = threading.Event()
    work = executor.start("work", lambda: ended.wait(60))
    sender = threading.Thread(target=signal_this_thread)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            executor._block_caller(work)
        assert not work.done()
    finally:
        ended.set()
        sender.join()
        signal.signal(signal.SIGALRM, before)


def test_an_operation_interrupted_before_it_sent_anything_does_no_harm(executor):
    def interrupt(operation):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor.run(OPERATION, interrupt)
    assert executor.run(OPERATION, lambda operation: "fine") == "fine"


class Members:
    """Notes what they are told."""

    def __init__(self):
        self.told = []

    def tell(self, operation, cause):
        self.told.append((operation, type(cause)))

    def withdraw(self, operation, cause):
        self.told.append("withdrawn")


def test_members_are_told_before_this_one_withdraws():
    members = Members()
    executor = SerialExecutor("test", Wait("test", None), members)
    executor.interrupt("bucket 0", KeyboardInterrupt())
    executor.interrupt("bucket 0", KeyboardInterrupt())
    assert members.told == [("bucket 0", KeyboardInterrupt), "withdrawn"]
    executor.close()


def test_members_are_told_that_this_one_was_interrupted_while_they_agree_on_who_is_left():
    def lose_a_member(operation):
        raise MembersLost("rank 1 died.", 1)

    def interrupt(wait):
        raise KeyboardInterrupt

    members = Members()
    executor = SerialExecutor("test", Wait("test", None), members, Recovery(JobRecovery(interrupt), "test"))
    with pytest.raises(KeyboardInterrupt):
        executor.run(OPERATION, lose_a_member)
    assert members.told == [(OPERATION.text, KeyboardInterrupt), "withdrawn"]
    with pytest.raises(RingError, match=r"interrupted in all_reduce.* by KeyboardInterrupt"):
        executor.run(OPERATION, thread_name)
    executor.close()


def test_a_signal_handler_cannot_run_an_operation_inside_another(executor):
    with pytest.raises(RingError, match=r"test: barrier\(\) was called inside all_reduce.*, by a signal handler"):
        executor.run(OPERATION, lambda operation: executor.run(fingerprint("barrier"), thread_name))


def test_rejected_arguments_do_no_harm(executor):
    def reject(operation):
        raise ArgumentError("no")

    with pytest.raises(ArgumentError):
        executor.run(OPERATION, reject)
    assert executor.run(OPERATION, lambda operation: "fine") == "fine"
    assert executor.statistics.operations == 1


def test_a_closed_executor_finishes_what_was_started_and_rejects_the_rest():
    executor, log = SerialExecutor("test", Wait("test", None)), []
    executor.start("slow", lambda: (time.sleep(0.02), log.append("slow")))
    executor.close()
    assert log == ["slow"]
    with pytest.raises(RingError, match="has been closed"):
        executor.run(OPERATION, thread_name)


def test_an_unused_executor_ends_its_thread_and_frees_results():
    class Result:
        pass

    executor = SerialExecutor("forgotten", Wait("forgotten", None))
    result = weakref.ref(executor.start("x", Result).wait())
    thread, alive = executor._thread._thread, weakref.ref(executor)
    del executor
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert alive() is None
    assert result() is None


def test_spans_of_operations_are_recorded_while_the_recorder_is_on(executor):
    recorder.on = True
    try:
        executor.run(OPERATION, thread_name)
        spans = [span for span in recorder.take() if span.name == OPERATION.text]
    finally:
        recorder.on = False
    assert [(span.kind, span.arguments["communicator"]) for span in spans] == [("call", "test")]
