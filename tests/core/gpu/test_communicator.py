"""DeviceCommunicator, with a stand-in for the GPU and for NCCL (see tests/gpu_stand_in.py)."""

import gc
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.base.errors import ArgumentError, DeviceError, PeerFailed
from ring_plugins.core.control.wait import PeerRejected
from ring_plugins.core.gpu import connection, executor, nccl
from tests.gpu_stand_in import alone
from tests.launch import run_ranks, start_ranks


@pytest.mark.ranks(3)
def test_every_collective_and_every_invalid_call(ranks):
    environment = {"RING_NCCL_REPORT": "1", "RING_INTERFACE": "lo"}
    result = run_ranks(Path(__file__).with_name("checks_communicator.py"), ranks, env=environment)
    assert result.values("failed") == [[]] * ranks
    assert result.output.count("rank 0: NCCL; network Socket; between GPUs of a host SHM.") == 1
    assert result.values("variables of NCCL") == [[None, None, "=lo"]] * ranks
    every = list(range(ranks))
    said = f"ranks {', '.join(map(str, every))}"
    for errors in result.values("errors"):
        for error, part in zip(
            errors,
            ("int16", "would round", "memory of the CPU", "GPU 1", f"root={ranks}", "out_counts", "framework"),
            strict=True,
        ):
            assert part in error
    assert result.values("launches") == [[["all_reduce", "all_reduce"]]] * ranks
    assert result.values("done") == [[False, True]] * ranks
    assert result.values("kept") == [0] * ranks
    assert result.values("kept by graphs") == [2] * ranks
    assert all("ordinary steps before the capture" in text for text in result.values("captured"))
    assert all("2.24" in text and "2.23.0" in text for text in result.values("float8"))
    assert all(
        said in text and "0000:01:00.0" in text and "RING_SHARE_GPU=1" in text for text in result.values("shared")
    )
    assert result.values("settings") == ["1"] * ranks
    others = "rank 0" if ranks == 2 else "ranks 0, 2"
    for text in result.values("versions"):
        assert f"{others}: 2.32.3 (stand-in); rank 1: 2.27.4 (stand-in)" in text
    assert all("there is no GPU 0" in text for text in result.values("no such GPU"))
    for text in result.values("start"):
        assert f"did not connect {said} of" in text and "within 1 s" in text
    assert all("stand-in status 6" in text and "what the stand-in says" in text for text in result.values("noticed"))
    assert result.values("aborted") == [["abort"]] * ranks


KILLED = """
    import os, signal, sys
    import numpy as np
    import ring_plugins as ring
    from ring_plugins.core import world
    from ring_plugins.core.arrays.memory import DeviceMemory
    from tests.gpu_stand_in import install
    from tests.worker import report

    ring.init(ranks=int(os.environ["TEST_RANKS"]))
    library, streams = install()
    communicator = world.current().new_device_communicator("test", 0, streams)
    x = np.ones(3, np.float32)
    memory = DeviceMemory(x.ctypes.data, x.size, "float32", 0, x)
    communicator.all_reduce(memory, ring.SUM)
    if ring.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL) if os.environ["TEST_END"] == "killed" else sys.exit()
    library.cuda.waits_at_once = False
    communicator.all_reduce(memory, ring.SUM)
    library.cuda.synchronize()
    try:
        communicator.check()
    except ring.PeerFailed as error:
        report("checked", str(error))
    try:
        communicator.all_reduce(memory, ring.SUM)
    except ring.PeerFailed as error:
        report("raised", str(error))
    report("log", [entry for entry in library.log if isinstance(entry, str)])
"""


@pytest.mark.parametrize(("end", "said"), [("killed", "rank 1 (process"), ("left", "rank 1 has left the job")])
def test_a_kernel_that_waits_for_a_dead_peer_is_aborted(end, said):
    with start_ranks(KILLED, 2, env={"TEST_END": end}) as job:
        result = job.wait(30)
    assert (result.returncode != 0) == (end == "killed")
    assert said in result.values("checked")[0]
    assert result.values("raised") == result.values("checked")
    assert result.values("log") == [["abort"]]


REJECTED = """
    import os, time
    import numpy as np
    import ring_plugins as ring
    from ring_plugins.core import world
    from ring_plugins.core.arrays.memory import DeviceMemory
    from tests.gpu_stand_in import install
    from tests.worker import report

    ring.init(ranks=int(os.environ["TEST_RANKS"]))
    library, streams = install()
    communicator = world.current().new_device_communicator("test", 0, streams)
    rejects = ring.rank() == 1

    def reduce(dtype):
        x = np.ones(3, dtype)
        communicator.all_reduce(DeviceMemory(x.ctypes.data, x.size, dtype, 0, x), ring.AVERAGE)

    for dtype in ("float32", "int32", "float32"):  # rejected by all, which changes nothing
        try:
            reduce(dtype)
        except ring.ArgumentError:
            pass
    communicator.barrier()
    library.cuda.waits_at_once = False
    try:
        reduce("int32" if rejects else "float32")
    except ring.ArgumentError:
        pass
    try:
        while True:  # the script goes on
            communicator.check()
            time.sleep(0.01)
    except ring.RingError as error:
        report("raised", [type(error).__name__, str(error)])
    ring.barrier()
"""


@pytest.mark.slow
def test_what_one_rank_rejects_reaches_a_gpu_that_waits_for_it():
    (told, text), (_, broken) = run_ranks(REJECTED, 2, timeout=60, check=False).values("raised")
    assert told == "PeerRejected"
    assert "rank 1 rejected the arguments of all_reduce: " in text
    assert text.endswith("The GPU of rank 0 waits for it in test: all_reduce.")
    assert "rank 0 gave up test: all_reduce" in broken


STALLED = """
    import os, time
    import numpy as np
    import ring_plugins as ring
    from ring_plugins.core import world
    from ring_plugins.core.arrays.memory import DeviceMemory
    from tests.gpu_stand_in import install

    ring.init(ranks=int(os.environ["TEST_RANKS"]))
    library, streams = install()
    library.cuda.waits_at_once = False
    communicator = world.current().new_device_communicator("gradients", 0, streams)
    x = np.ones(3, np.float32)
    memory = DeviceMemory(x.ctypes.data, x.size, "float32", 0, x)

    def reduce(bucket):
        return communicator.start(bucket, lambda: communicator.all_reduce(memory, ring.SUM))

    works = [reduce("bucket 0 of 2 (a)")]
    if ring.rank() == 1:
        time.sleep(5)  # asleep here
    works.append(reduce("bucket 1 of 2 (b)"))
    time.sleep(2 if ring.rank() == 1 else 7)  # the script goes on
    communicator.synchronize()
"""


@pytest.mark.slow
def test_a_stall_report_names_the_operation_that_gpus_wait_in():
    result = run_ranks(STALLED, 3, env={"RING_STALL_WARNING": "2"}, timeout=60)
    said = result.output
    assert "ranks 0, 2 have been waiting since" in said
    assert "in gradients: all_reduce on the GPU, part of bucket 1 of 2 (b), for rank 1" in said
    assert "missing: rank 1 (process" in said
    assert "last operation: gradients: all_reduce on the GPU of bucket 0 of 2 (a), finished" in said
    assert "time.sleep(5)  # asleep here" in said
    assert "the stall is over" in said


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


def test_events_are_used_again():
    communicator, library = alone()
    for _ in range(10):
        reduce(communicator)
        communicator.synchronize()
    assert library.cuda.created_events <= 4
    communicator.close()
    assert library.cuda.events == {}


@pytest.mark.parametrize("size", [3, 6, 7, 12])
def test_averages_of_16_bit_numbers_are_not_biased(size):
    communicator, library = alone()
    communicator.size = size  # as if the other ranks had zeros
    numbers = torch.rand(4096, dtype=torch.bfloat16) + 1
    x = numbers.view(torch.uint16).numpy().copy()
    communicator.all_reduce(DeviceMemory(x.ctypes.data, x.size, "bfloat16", 0, x), Op.AVERAGE)
    communicator.synchronize()
    averages = torch.from_numpy(x).view(torch.bfloat16)
    assert abs(float((averages.double() * size / numbers.double()).mean()) - 1) < 2e-4
    assert library.reductions == [nccl.REDUCTIONS[Op.SUM]]  # NVLS and the symmetric kernels have no average


@pytest.mark.parametrize(("dtype", "op"), [(np.float16, Op.AVERAGE), (np.float32, Op.SUM)])
def test_only_what_a_sum_could_overflow_is_averaged_by_nccl(dtype, op):
    communicator, library = alone()
    communicator.size = 2
    full, out = np.full(4, 3, dtype), np.zeros(4, dtype)
    communicator.reduce_scatter(on_device(full), on_device(out), [4], Op.AVERAGE)
    communicator.synchronize()
    assert library.reductions == [nccl.REDUCTIONS[op]]
    assert full.tolist() == [3] * 4
    assert out.tolist() == [3 if op is Op.AVERAGE else 1.5] * 4  # the stand-in averages over one rank


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

    reject()
    reject()
    reduce(communicator)
    reject()
    assert host.groups.told == [(0, 0, "all_reduce"), (0, 1, "all_reduce"), (1, 0, "all_reduce")]
    communicator.synchronize()
    communicator.executor.poll([])
    done = threading.Event()
    library.cuda.waits_at_once = False
    library.cuda.streams[communicator.stream].work.put(done.wait)
    reduce(communicator)  # the second operation, after one rejected call
    host.groups.rejections = {(0, 0): "done since", (1, 0): "rejected here too", (2, 0): "not called yet"}
    communicator.executor.poll([])
    communicator.check()
    host.groups.rejections[1, 1] = "rank 1 rejected it."
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
