"""Works and futures, without other ranks."""

import signal
import threading
import time
from datetime import timedelta

import pytest
import torch

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import MismatchError, RingError, TimeoutExceeded
from ring_plugins.core.collectives.executor import SerialExecutor
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.control.wait import Wait
from ring_plugins.torch import device
from ring_plugins.torch.work import GpuWork, RingWork


@pytest.fixture
def executor():
    made = SerialExecutor("test", Wait("test", None))
    yield made
    made.close()


@pytest.mark.parametrize("future_first", [True, False])
def test_a_future_is_fulfilled_whether_it_was_asked_for_before_or_after_the_end(executor, future_first):
    output, end = torch.ones(2), threading.Event()
    work = RingWork("all_reduce", [output]).run_on(executor, end.wait)
    future = work.get_future() if future_first else None
    assert not work.is_completed()
    end.set()
    work.wait()
    future = future or work.get_future()
    assert future.wait()[0] is output
    assert work.get_future() is future
    assert work.wait()
    assert work.result() == [output]


@pytest.mark.parametrize("future_first", [True, False])
def test_an_error_crosses_whole_to_the_waiter_and_as_text_to_the_future(executor, future_first):
    error, end = MismatchError("sizes differ"), threading.Event()

    def fail():
        end.wait()
        raise error

    work = RingWork("all_reduce", []).run_on(executor, fail)
    future = work.get_future() if future_first else None
    end.set()
    with pytest.raises(MismatchError) as caught:
        work.wait()
    assert caught.value is error is work.exception()
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(RuntimeError, match="MismatchError: sizes differ"):
        (future or work.get_future()).wait()


def test_callbacks_run_when_another_thread_finishes_the_work(executor):
    work = RingWork("all_reduce", [torch.tensor(3.0)]).run_on(executor, lambda: time.sleep(0.05))
    doubled = work.get_future().then(lambda future: 2 * future.value()[0])
    assert doubled.wait() == 6


def test_wait_gives_up_after_its_time(executor):
    end = threading.Event()
    work = RingWork("all_reduce in process group 'x'", []).run_on(executor, end.wait)
    with pytest.raises(TimeoutExceeded, match=r"all_reduce in process group 'x' was not complete after .*0:00:00.1"):
        work.wait(timedelta(seconds=0.1))
    end.set()
    assert work.wait(timedelta(seconds=10))


def test_a_work_that_was_done_from_the_start_is_complete():
    work = RingWork("all_reduce", [torch.ones(2)])
    assert work.wait() and work.is_success() and work.source_rank() == -1
    assert work.get_future().wait()[0].tolist() == [1, 1]


def test_an_error_inside_the_operation_is_the_works():
    def fail():
        raise MismatchError("no")

    work = RingWork("barrier", []).run_on(SingleCommunicator("alone"), fail)
    with pytest.raises(MismatchError, match="no"):
        work.wait()


def test_a_gpu_makes_no_future_unless_asked_for_one(gpu, monkeypatch):
    made = []
    new = device.future_on_gpu
    monkeypatch.setattr(device, "future_on_gpu", lambda index: made.append(index) or new(index))
    output = torch.ones(2)
    queued = gpu.communicator.start("all_reduce", lambda: gpu.communicator.all_reduce(device.memory_of(output), Op.SUM))
    work = GpuWork("all_reduce", [output], 0).set_queued(gpu.communicator, queued)
    assert work.wait()
    assert made == []
    assert work.get_future().wait()[0] is output
    assert work.get_future() is work.get_future()
    assert made == [0]


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=60)])
def test_an_interrupted_wait_breaks_the_communicator(executor, timeout):
    def wait_until_broken():  # as every wait of an operation does
        end = time.monotonic() + 60
        while executor.failure.error is None and time.monotonic() < end:
            time.sleep(0.001)

    work = RingWork("all_reduce", []).run_on(executor, wait_until_broken)

    def stop(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            work.wait(timeout)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(RingError, match="test was interrupted in all_reduce by KeyboardInterrupt"):
        executor.failure.check()
    assert work.is_completed()  # the exception came out only after the thread had let go of the memory
