"""DeviceCommunicator, with a stand-in for the GPU and for NCCL (see tests/gpu_stand_in.py)."""

import os

import numpy as np
import pytest
import torch

from ring_plugins.core.arrays.dtypes import STORAGE, Op
from ring_plugins.core.arrays.memory import DeviceMemory, HostMemory
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.gpu import nccl, nccl_log
from tests.gpu_stand_in import alone, on_gpus


def on_device(array, dtype=None):
    return DeviceMemory(array.ctypes.data, array.size, dtype or array.dtype.name, 0, array)


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective(size):
    def of_rank(rank, communicator, library):
        ranks = np.arange(size)
        for dtype in ("float32", "float64", "float16", "int32", "int64", "uint8", "int8", "uint32", "uint64"):
            factorial = 6 if size == 3 else 2
            for op, expected in ((Op.SUM, ranks.sum() + size), (Op.MAX, size), (Op.MIN, 1), (Op.PRODUCT, factorial)):
                x = np.full(5, rank + 1, dtype)
                communicator.all_reduce(on_device(x), op)
                assert x.tolist() == [expected] * 5, (dtype, op)
        x = np.full(7, rank, np.float32)
        communicator.all_reduce(on_device(x), Op.AVERAGE)
        assert x.tolist() == [(size - 1) / 2] * 7
        x = np.full(3, rank + 1j, np.complex64)
        communicator.all_reduce(on_device(x), Op.SUM)
        assert x.tolist() == [ranks.sum() + size * 1j] * 3
        for op, expected in ((Op.SUM, [True, True, False]), (Op.PRODUCT, [False, True, False])):
            x = np.array([rank == 0, True, False])
            communicator.all_reduce(on_device(x), op)
            assert x.tolist() == expected
        x = np.full(4, 0x3F80 if rank else 0x4000, np.uint16)  # 1.0 and, on rank 0, 2.0
        communicator.all_reduce(on_device(x, "bfloat16"), Op.MAX)
        assert x.tolist() == [0x4000] * 4
        for dtype in STORAGE:
            x = np.full(3, rank + 1).astype(STORAGE[dtype])
            communicator.broadcast(on_device(x, dtype), size - 1)
            assert np.array_equal(x, np.full(3, size).astype(STORAGE[dtype])), dtype
        for counts in ([2] * size, list(range(size))):
            mine, out = np.full(counts[rank], rank, np.int16), np.zeros(sum(counts), np.int16)
            communicator.all_gather(on_device(mine), on_device(out), counts)
            assert out.tolist() == np.repeat(ranks, counts).tolist()
            full, part = np.arange(sum(counts), dtype=np.float32) + rank, np.zeros(counts[rank], np.float32)
            communicator.reduce_scatter(on_device(full), on_device(part), counts, Op.AVERAGE)
            start = sum(counts[:rank])
            assert part.tolist() == (np.arange(start, start + counts[rank]) + (size - 1) / 2).tolist()
        send_counts = [(rank + i) % size for i in range(size)]
        send = np.repeat(ranks + 10 * rank, send_counts).astype(np.int32)
        out = np.zeros(sum(send_counts), np.int32)
        communicator.all_to_all(on_device(send), send_counts, on_device(out), send_counts)
        assert out.tolist() == np.repeat(rank + 10 * ranks, send_counts).tolist()
        assert communicator.all_gather_object(rank) == ranks.tolist()
        assert communicator.broadcast_object(rank, 1) == 1
        communicator.barrier()

    on_gpus(size, of_rank)


def test_several_in_one_group_and_one_while_the_caller_goes_on():
    def of_rank(rank, communicator, library):
        arrays = [np.full(n, rank, np.float32) for n in (3, 4)]
        with communicator.group():
            for array in arrays:
                communicator.all_reduce(on_device(array), Op.SUM)
        assert [array.tolist() for array in arrays] == [[1] * 3, [1] * 4]
        assert library.log == [["all_reduce", "all_reduce"]]
        library.delay = 0.1
        x = np.full(5, rank, np.float32)
        work = communicator.start("later", lambda: communicator.all_reduce(on_device(x), Op.SUM))
        assert not work.done() and x.tolist() == [rank] * 5
        work.wait()
        assert work.done() and x.tolist() == [1] * 5
        communicator.synchronize()
        assert not communicator.executor.queue.unfinished

    on_gpus(2, of_rank)


def test_invalid_arguments_leave_the_communicator_usable():
    def of_rank(rank, communicator, library):
        x = np.zeros(3, np.int16)
        host = HostMemory(np.zeros(3, np.float32), "float32")
        for text, call in {
            "int16": lambda: communicator.all_reduce(on_device(x), Op.SUM),
            "would round": lambda: communicator.all_reduce(on_device(x.astype(np.int32)), Op.AVERAGE),
            "memory of the CPU": lambda: communicator.all_reduce(host, Op.SUM),
            "GPU 1": lambda: communicator.broadcast(DeviceMemory(0, 0, "float32", 1), 0),
            "root=2": lambda: communicator.broadcast(on_device(x), 2),
            "out_counts": lambda: communicator.all_to_all(on_device(x), [3, 0], on_device(x), [9, 9]),
            "framework": lambda: communicator.allocate(1),
        }.items():
            with pytest.raises(ArgumentError, match=text):
                call()
        communicator.executor.connection.nccl.version = 22300
        with pytest.raises(ArgumentError, match=r"float8_e5m2 needs NCCL 2\.24.*2\.23\.0"):
            communicator.all_reduce(DeviceMemory(1, 1, "float8_e5m2", 0), Op.SUM)
        x = np.ones(3, np.float32)
        communicator.all_reduce(on_device(x), Op.SUM)
        assert x.tolist() == [2] * 3

    on_gpus(2, of_rank)


def test_a_capture_keeps_its_memory_and_nobody_asks_about_its_events():
    communicator, library = alone()
    reduce(communicator)
    library.cuda.capturing = True
    reduce(communicator)
    communicator.start("in a graph", lambda: reduce(communicator)).wait()
    communicator.executor.poll([])  # about the earlier one
    assert len(communicator.executor.queue.captured) == 2


def test_what_nccl_has_chosen_is_told_once_and_its_variables_are_taken_back(monkeypatch, caplog):
    monkeypatch.setenv("RING_NCCL_REPORT", "1")
    for variable in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(variable, raising=False)
    nccl_log.nccl_log.cache_clear()

    def of_rank(rank, communicator, library):
        communicator.all_reduce(on_device(np.ones(3, np.float32)), Op.SUM)
        communicator.synchronize()
        for _ in range(2 if rank == 0 else 0):
            communicator.executor.poll([])  # as the watchdog does

    with caplog.at_level("INFO", "ring_plugins"):
        on_gpus(2, of_rank)
    nccl_log.nccl_log.cache_clear()
    assert caplog.messages == ["rank 0: NCCL; network Socket; between GPUs of a host SHM."]
    assert {"NCCL_DEBUG", "NCCL_DEBUG_FILE"}.isdisjoint(os.environ)


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
