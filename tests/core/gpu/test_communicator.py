"""DeviceCommunicator, with a stand-in for the GPU and for NCCL (see tests/gpu_stand_in.py)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.gpu import nccl
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
