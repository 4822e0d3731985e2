"""What an executor keeps, tells and finds, with a stand-in for the GPU and for NCCL."""

import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.base.errors import ArgumentError, DeviceError
from ring_plugins.core.control.wait import PeerRejected
from ring_plugins.core.gpu import executor
from tests.gpu_stand_in import alone


def on_device(array):
    return DeviceMemory(array.ctypes.data, array.size, array.dtype.name, 0, array)


def reduce(communicator):
    communicator.all_reduce(on_device(np.ones(3, np.float32)), Op.SUM)


def test_what_a_started_function_writes_to_lives_until_the_gpu_is_done():
    class Destination:
        def store(self):
            pass

    communicator, library = alone()
    destination, done = Destination(), threading.Event()
    seen = weakref.ref(destination)
    library.cuda.streams[communicator.stream].work.put(done.wait)

    def operation(target=destination):
        reduce(communicator)
        target.store()  # a copy on the GPU, behind the reduction

    communicator.start("async", operation)  # nobody keeps the work
    del destination, operation
    gc.collect()
    lived = seen() is not None
    done.set()
    communicator.synchronize()
    gc.collect()
    assert lived
    assert seen() is None


class Groups:
    """What this member has rejected, and what others have, by number and rejections before."""

    def __init__(self):
        self.told, self.rejections = [], {}

    def reject(self, number, before, operation, error):
        self.told.append((number - executor._ON_GPU, before, operation))

    def rejection(self, number, before):
        return self.rejections.get((number - executor._ON_GPU, before), "")


class Host:
    """The communicator of the hosts."""

    def __init__(self, host):
        self.host, self.groups, self.interrupted = host, Groups(), []

    def __getattr__(self, name):
        return getattr(self.host, name)

    def interrupt(self, operation, error):
        self.interrupted.append(operation)


def test_rejections_are_counted_from_the_last_operation_and_found_by_the_watchdog(monkeypatch):
    monkeypatch.setattr(executor, "HostCommunicator", Host)
    communicator, library = alone()
    communicator._host = communicator.executor.host = host = Host(communicator._host)
    integers = on_device(np.ones(3, np.int32))

    def reject():
        with pytest.raises(ArgumentError) as caught:
            communicator.all_reduce(integers, Op.AVERAGE)
        communicator.reject("a layer above", caught.value)  # knows the same error

    for _ in range(3):
        reject()
    reduce(communicator)
    reject()
    assert host.groups.told == [(number, before, "all_reduce") for number, before in ((0, 0), (0, 1), (0, 2), (1, 0))]
    communicator.executor.count_anew(3)  # a member that has run fewer operations tells the same of its next one
    reject()
    assert host.groups.told.pop() == (3 << 40, 0, "all_reduce")
    communicator.executor.count_anew(0)
    reject()
    assert host.groups.told.pop() == (0, 0, "all_reduce")
    communicator.synchronize()
    communicator.executor.poll([])
    done = threading.Event()
    library.cuda.waits_at_once = False
    library.cuda.streams[communicator.stream].work.put(done.wait)
    reduce(communicator)  # the second operation, after one rejected call
    host.groups.rejections = {(-1, 0): "done since", (0, 0): "rejected here too", (1, 0): "not called yet"}
    communicator.executor.poll([])
    communicator.check()
    host.groups.rejections[0, 1] = "rank 1 rejected it."
    communicator.executor.poll([])
    with pytest.raises(PeerRejected, match=r"rank 1 rejected it. The GPU of rank 0 waits for it in .*: all_reduce"):
        communicator.check()
    assert len(host.interrupted) == 1
    done.set()


def test_a_failure_of_this_ranks_gpu_is_told_to_the_others_whose_gpus_would_wait_for_it():
    communicator, library = alone()
    communicator.executor.host = host = Host(communicator._host)
    reduce(communicator)
    library.async_error = 6
    communicator.executor.poll([])
    with pytest.raises(DeviceError):
        reduce(communicator)
    assert host.interrupted == [f"{communicator.name}: all_reduce"]


def test_a_communicator_whose_members_are_gone_is_aborted_as_finalizing_would_wait_for_them():
    communicator, library = alone()
    reduce(communicator)
    communicator.executor.recovery = SimpleNamespace(is_stale=True, trouble="", reject_capture=None)
    communicator.close()
    assert library.log == [["all_reduce"], "abort"]


def test_a_failure_that_nccl_reports_is_told_before_a_call_raises_it():
    communicator, library = alone()
    reduce(communicator)
    assert communicator.executor.failed() is None
    library.async_error = 6
    assert "stand-in status 6" in str(communicator.executor.failed())
