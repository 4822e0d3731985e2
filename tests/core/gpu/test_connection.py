"""How a communicator of NCCL's begins, queues groups and ends, with a stand-in for the GPU and for NCCL."""

import threading
import time

import numpy as np
import pytest

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.base.errors import PeerFailed, TimeoutExceeded
from ring_plugins.core.gpu import connection
from tests.gpu_stand_in import alone


def on_device(array):
    return DeviceMemory(array.ctypes.data, array.size, array.dtype.name, 0, array)


def reduce(communicator):
    communicator.all_reduce(on_device(np.ones(3, np.float32)), Op.SUM)


def test_a_communicator_is_finalized_and_destroyed():
    communicator, library = alone()
    reduce(communicator)
    communicator.close()
    assert library.log == [["all_reduce"], "finalize", "destroy"]


def test_a_group_that_nccl_has_queued_at_once_is_not_polled():
    communicator, library = alone()
    reduce(communicator)
    library.polls = library.asked = 0
    reduce(communicator)
    assert library.asked == 0


def test_no_nap_while_a_thread_of_nccl_queues_a_group(monkeypatch):
    communicator, library = alone()
    reduce(communicator)
    monkeypatch.setattr(connection, "_SPIN", 5.0)  # a thread of the stand-in may be slow on a busy machine
    monkeypatch.setattr(communicator.executor.wait, "until", None)
    library.group_seconds = 0.0005
    reduce(communicator)


@pytest.mark.timeout(120)
def test_a_live_graph_does_not_hold_up_closing():
    communicator, library = alone()
    reduce(communicator)
    library.cuda.capturing = True
    reduce(communicator)
    library.cuda.capturing = False
    communicator.close()  # NCCL would wait for the graph's end
    assert library.log == [["all_reduce"], ["all_reduce"]]  # left to the end of the process


@pytest.mark.timeout(120)
def test_a_finalize_that_does_not_end_is_aborted_elsewhere(monkeypatch):
    monkeypatch.setattr(connection, "FINALIZE_TIMEOUT", 0.05)
    monkeypatch.setattr(connection, "_ABORT_TIMEOUT", 0.05)
    communicator, library = alone()
    reduce(communicator)
    (made,) = library.communicators.values()
    made.unreferenced.clear()  # by a graph that our queue does not know of
    communicator.close()
    assert library.log[1:] == ["finalize", "abort"]
    made.unreferenced.set()


@pytest.mark.timeout(120)
def test_nobody_waits_for_an_abort_that_hangs(monkeypatch):
    monkeypatch.setattr(connection, "_ABORT_TIMEOUT", 0.05)
    communicator, library = alone()
    reduce(communicator)
    library.aborts_end = False
    error = PeerFailed("rank 1 died", 1)
    threading.Thread(target=communicator.executor.abort, args=(error,), daemon=True).start()
    deadline = time.monotonic() + 60
    while "abort" not in library.log and time.monotonic() < deadline:
        time.sleep(0.001)
    assert "abort" in library.log  # and it never returns
    raised = []

    def call():
        try:
            reduce(communicator)
        except PeerFailed as failure:
            raised.append(failure)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(30)
    assert [(type(again), str(again), again.rank) for again in raised] == [(PeerFailed, "rank 1 died", 1)]
    communicator.close()


def test_a_blocking_communicator_has_queued_a_group_when_the_call_returns():
    communicator, library = alone(blocks=True)
    library.asked = 0
    reduce(communicator)
    assert library.asked == 0
    communicator.close()
    assert library.log == [["all_reduce"], "finalize", "destroy"]


def test_who_connects_is_not_stuck_in_a_call_that_never_returns(monkeypatch):
    monkeypatch.setenv("RING_START_TIMEOUT", "0.1")
    held = threading.Event()
    with pytest.raises(TimeoutExceeded, match=r"NCCL did not connect rank 0 of rank 0 within 0.1 s"):
        alone(blocks=True, held=held)
    held.set()


def test_nor_is_who_closes_and_nobody_aborts_beside_that_call(monkeypatch):
    monkeypatch.setattr(connection, "FINALIZE_TIMEOUT", 0.05)
    communicator, library = alone(blocks=True)
    library.held = threading.Event()
    communicator.close()
    assert library.log == ["finalize"]
    library.held.set()


def test_nor_beside_a_thread_that_registers_memory(monkeypatch):
    communicator, library = alone(blocks=True)
    monkeypatch.setenv("RING_START_TIMEOUT", "0.1")
    monkeypatch.setattr(connection, "_ABORT_TIMEOUT", 0.1)
    library.held = threading.Event()
    with pytest.raises(TimeoutExceeded, match=r"NCCL did not register \d+ bytes as a window within 0.1 s"):
        communicator.allocate_registered(64)
    communicator.close()
    assert library.log == []
    library.held.set()
    communicator.executor.connection._aborting.join(60)
    assert library.log == ["window", "abort"]  # once the call has returned


def test_a_thread_that_is_stuck_while_it_queues_a_group_is_seen():
    communicator, library = alone(blocks=True)
    library.held = threading.Event()
    now, executor = time.monotonic(), communicator.executor
    thread = threading.Thread(target=reduce, args=(communicator,), daemon=True)
    thread.start()
    while not executor.connection.queuing[0]:
        time.sleep(0.001)
    since, what = executor.connection.queuing
    assert since >= now and what == "all_reduce"
    library.held.set()
    thread.join()
    assert executor.connection.queuing == (0.0, "")
