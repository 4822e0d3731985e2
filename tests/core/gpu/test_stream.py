"""The queue of one communicator on a stream, on the stand-in for the driver."""

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import ArgumentError, PeerLeft, TimeoutExceeded
from ring_plugins.core.gpu import stream
from ring_plugins.core.gpu.cuda import Driver
from ring_plugins.core.gpu.stream import StreamQueue
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.trace.steps import StepClock
from tests.gpu_stand_in import CALLERS_STREAM, StandInDriver


class Memory:
    pass


class Gpu:
    """A queue, and a gate before which the work of the caller's stream or of the communication stream stands."""

    def __init__(self):
        self.library, self.gate = StandInDriver(), threading.Event()
        self.library.waits_at_once = False
        driver = Driver(self.library)
        self.caller = CALLERS_STREAM
        with driver.device(0):
            stream = driver.new_stream(0)
            self.computing = driver.new_stream(0)
        self.work = self.library.streams[stream].work
        streams = SimpleNamespace(current=lambda: self.caller)
        self.queue = StreamQueue("gradients", 0, stream, streams, driver)
        self.context = driver.device(0)

    def block(self):
        self.work.put(self.gate.wait)

    def open(self):
        self.gate.set()
        for handle in (self.computing, self.queue.stream):
            self.library.streams[handle].drain()

    def push(self, memory=None):
        caller = self.queue.follow_caller("all_reduce")
        self.queue.keep_alive([memory])
        return self.queue.push("bucket 0", "all_reduce", 7, caller)


@pytest.fixture
def gpu():
    gpu = Gpu()
    with gpu.context:
        yield gpu
    gpu.gate.set()


def test_memory_lives_until_its_operation_is_done(gpu):
    memory = Memory()
    seen = weakref.ref(memory)
    gpu.block()
    gpu.push(memory)
    del memory
    gpu.queue.drop_finished()
    gc.collect()
    assert seen() is not None
    gpu.open()
    gpu.queue.drop_finished()
    gc.collect()
    assert seen() is None


def released_after_joining_on(gpu, stream):
    """Whether an operation's memory is released once a stream waits for it, while the GPU still works on it."""
    memory = Memory()
    seen = weakref.ref(memory)
    gpu.caller = gpu.computing
    gpu.block()
    queued = gpu.push(memory)
    del memory
    gpu.caller = stream
    gpu.queue.make_follow(gpu.caller, queued)
    gc.collect()
    return seen() is None


def test_memory_is_released_to_the_stream_that_waits_for_the_operation(gpu):
    assert released_after_joining_on(gpu, gpu.computing)


def test_memory_lives_on_if_another_stream_waits_for_the_operation(gpu):
    assert not released_after_joining_on(gpu, CALLERS_STREAM)


def test_a_capture_keeps_its_memory_and_queries_nothing(gpu):
    gpu.push()
    gpu.open()
    gpu.queue.drop_finished()
    gpu.library.capturing = True  # the stand-in fails where an event is queried now
    queued = gpu.push()
    assert not gpu.queue.is_done(queued)
    gpu.queue.poll()
    assert gpu.queue.captured == [queued]


def test_the_first_operation_may_not_be_captured(gpu):
    gpu.library.capturing = True
    with pytest.raises(ArgumentError, match="ordinary steps before the capture"):
        gpu.push()


def test_an_operation_starts_after_the_callers_work(gpu):
    gpu.caller = gpu.computing
    gpu.library.streams[gpu.computing].work.put(gpu.gate.wait)
    queued = gpu.push()
    gpu.queue.poll()
    assert not queued.reached_at
    assert gpu.queue.long_wait([1]) is None
    assert "queued; the GPU computes" in gpu.queue.activity().operation
    gpu.block()
    gpu.open()
    gpu.queue.poll()
    assert queued.done_at >= queued.reached_at > 0


def test_a_wait_of_the_gpu_names_operation_and_peers(gpu):
    gpu.block()
    gpu.push()
    gpu.queue.poll()
    wait = gpu.queue.long_wait([1, 2])
    assert (wait.what, wait.part_of, wait.number, wait.missing, wait.on_gpu) == (
        "gradients: all_reduce on the GPU",
        "bucket 0",
        7,
        (1, 2),
        True,
    )


def test_waiting_for_a_rank_that_has_left_ends(gpu, monkeypatch):
    monkeypatch.setattr(stream, "_IN_FLIGHT", 0.0)
    gpu.block()
    gpu.push()
    gpu.queue.poll()
    gpu.queue.check_progress([])
    gpu.queue.check_progress([1])  # its data may still be on the way
    with pytest.raises(PeerLeft, match="rank 1 has left the job, but the GPU of rank 0 waits for it"):
        gpu.queue.check_progress([1])


def test_a_gpu_that_still_computes_waits_for_nobody(gpu, monkeypatch):
    monkeypatch.setattr(stream, "_IN_FLIGHT", 0.0)
    gpu.caller = gpu.computing
    gpu.library.streams[gpu.computing].work.put(gpu.gate.wait)
    gpu.push()
    for _ in range(3):
        gpu.queue.poll()
        gpu.queue.check_progress([1])


def test_nor_does_a_message_whose_stream_waits_for_what_the_gpu_computes(gpu, monkeypatch):
    monkeypatch.setattr(stream, "_IN_FLIGHT", 0.0)
    gpu.caller = gpu.queue.stream
    gpu.block()
    gpu.push()
    for _ in range(3):
        gpu.queue.poll()
        gpu.queue.check_progress([1])


def test_an_operation_may_take_as_long_as_the_timeout(gpu):
    gpu.block()
    queued = gpu.push()
    gpu.queue.check_progress([])
    queued.queued_at -= 1e6
    with pytest.raises(TimeoutExceeded, match=r"the GPU has not finished bucket 0 for \d+ s\. A rank did not call it"):
        gpu.queue.check_progress([])


@pytest.fixture
def recording(monkeypatch):
    recorder.take()
    monkeypatch.setattr(recorder, "on", True)
    yield
    recorder.take()


def test_a_timeline_has_the_gpus_time_of_an_operation_without_waiting_for_it(gpu, recording):
    gpu.block()
    queued = gpu.push()
    gpu.queue.drop_finished()
    assert recorder.take() == []
    gpu.open()
    gpu.queue.drop_finished()
    (span,) = recorder.take()
    assert (span.kind, span.name, span.arguments) == ("gpu", "bucket 0", {"operation": "all_reduce"})
    assert span.begin <= span.end == int(queued.done_at * 1e9)
    assert not gpu.library.timed


def test_what_is_captured_or_forgotten_leaves_no_timed_events(gpu, recording):
    gpu.block()
    gpu.push()
    gpu.library.capturing = True
    gpu.push()
    gpu.library.capturing = False
    gpu.queue.follow_caller("all_reduce")
    assert len(gpu.library.timed) == 3
    gpu.queue.clear()
    assert not gpu.library.timed
    gpu.open()


def test_nothing_is_timed_without_a_timeline(gpu):
    gpu.push()
    assert not gpu.library.timed
    gpu.open()


@pytest.fixture
def clock(monkeypatch):
    clock = StepClock()
    monkeypatch.setattr(stream, "steps", clock)
    return clock


def train(gpu, clock, steps, buckets):
    """Steps that reduce some buckets each; returns how many calls of the driver they took."""
    before = gpu.calls
    for _ in range(steps):
        gate = threading.Event()  # the GPU begins when all is queued, so how often it is asked does not depend on it
        gpu.work.put(gate.wait)
        for queued in [gpu.push() for _ in range(buckets)]:
            gpu.queue.make_follow(gpu.caller, queued)
        gate.set()
        gpu.open()
        gpu.queue.drop_finished()
        clock.ended.append((time.monotonic(), clock.count, clock.waiting, clock.moving, clock.gpu_wait, 8))
        clock.count += 1
    return gpu.calls - before


def test_timing_costs_about_two_calls_a_step(gpu, clock, monkeypatch):
    gpu.calls, call = 0, gpu.queue._driver._library.call

    def count(name, *arguments):
        gpu.calls += 1
        return call(name, *arguments)

    gpu.queue._driver._library.call = count
    gpu.caller = gpu.computing
    train(gpu, clock, 10, 6)  # the first ones create events
    timed = train(gpu, clock, 50, 6)
    assert gpu.queue.seconds.keys() == {"bucket 0"}
    assert clock.on_gpu
    monkeypatch.setattr(stream, "_TIMED_OPERATIONS", 0)
    untimed = train(gpu, clock, 50, 6)
    assert 0 < timed - untimed <= 17 * 6
    assert not gpu.library.timed


def test_operations_between_two_steps_are_timed_up_to_a_limit(gpu, clock):
    clock.count = 10
    gpu.block()
    for _ in range(stream._TIMED_OPERATIONS + 5):
        gpu.push()
    assert sum(bool(queued.times) for queued in gpu.queue.unfinished) == stream._TIMED_OPERATIONS


def test_the_gpus_wait_for_an_operation_is_known(gpu, clock):
    clock.count, gpu.caller = 10, gpu.computing
    gpu.block()
    first, second = gpu.push(), gpu.push()
    gpu.queue.make_follow(gpu.caller, first)
    assert gpu.library.events[first.join_time].wait(60)  # the computing stream has come to the join
    gpu.open()
    gpu.library.streams[gpu.queue.stream].drain()
    gpu.queue.make_follow(gpu.caller, second)  # is done by now: nobody waits for it
    gpu.library.streams[gpu.computing].drain()
    gpu.queue.drop_finished()
    assert clock.on_gpu
    assert clock.gpu_wait > 0
    waited = clock.gpu_wait
    clock.add_gpu_wait(10, 0.0)
    assert clock.gpu_wait == waited
    assert "all_reduce on the GPU, which took" in gpu.queue.activity().operation
    clock.count = 60
    gpu.push()  # done before anybody waits for it
    gpu.library.streams[gpu.queue.stream].drain()
    gpu.queue.drop_finished()
    assert clock.gpu_wait == 0  # what was measured in step 10 does not count any more


def test_calls_keep_the_interpreters_lock_only_while_no_full_stream_can_wait_for_a_dead_rank(gpu, monkeypatch):
    monkeypatch.setattr(stream, "_awaited", {})  # that of other tests
    driver, kept = gpu.queue._driver, []
    driver.keeping.wait_event = lambda stream, event: kept.append(stream) or driver.wait_event(stream, event)
    first = gpu.push()
    assert kept == [gpu.queue.stream]
    gpu.block()
    second = gpu.push()
    assert len(kept) == 2  # unfinished, but nobody waits for it
    gpu.queue.make_follow(gpu.caller, second)
    assert len(kept) == 3
    gpu.push()
    gpu.queue.make_follow(gpu.caller, second)
    assert len(kept) == 3  # the caller's stream may be full, and never go on
    gpu.open()
    gpu.push()
    assert len(kept) == 4
    assert gpu.queue.is_done(first)


def test_calls_release_the_lock_where_the_communication_stream_may_be_full(gpu, monkeypatch):
    monkeypatch.setattr(stream, "_ROOM", 2)
    monkeypatch.setattr(stream, "_awaited", {})
    gpu.block()
    calls = []
    for _ in range(3):
        gpu.push()
        calls.append(gpu.queue._launching is gpu.queue._driver.keeping)
    assert calls == [True, True, False]
