"""Every collective of the device communicator against its expected result, with the stand-in, on 2 and 3 ranks."""

import os
import time

import numpy as np

import ring_plugins as ring
from ring_plugins.core import world
from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.arrays.memory import DeviceMemory, HostMemory
from ring_plugins.core.base.errors import ArgumentError, DeviceError, RingError
from ring_plugins.core.gpu import load_driver, load_nccl
from tests.gpu_stand_in import install
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
rank, size = ring.rank(), ring.size()
library, streams = install()
communicator = world.current().new_device_communicator("test", 0, streams)


def on_device(array, dtype=None):
    return DeviceMemory(array.ctypes.data, array.size, dtype or array.dtype.name, 0, array)


failed = []


def check(what, got, expected):
    if not np.array_equal(got, expected):
        failed.append(f"{what}: {got} instead of {expected}")


def raised(function, kind):
    try:
        function()
    except kind as error:
        return str(error)
    failed.append(f"no {kind.__name__}")
    return ""


ranks = np.arange(size)
for dtype in ("float32", "float64", "float16", "int32", "int64", "uint8", "int8", "uint32", "uint64"):
    for op, expected in (
        (ring.SUM, ranks.sum() + size),
        (ring.MAX, size),
        (ring.MIN, 1),
        (ring.PRODUCT, 6 if size == 3 else 2),
    ):
        x = np.full(5, rank + 1, dtype)
        communicator.all_reduce(on_device(x), op)
        check(f"{op} {dtype}", x, np.full(5, expected, dtype))
communicator.synchronize()
communicator.executor.poll([])  # as its watchdog does
report("variables of NCCL", [os.environ.get(name) for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_SOCKET_IFNAME")])
x = np.full(7, rank, np.float32)
communicator.all_reduce(on_device(x), ring.AVERAGE)
check("average", x, np.full(7, (size - 1) / 2, np.float32))
x = np.full(3, rank + 1j, np.complex64)
communicator.all_reduce(on_device(x), ring.SUM)
check("complex", x, np.full(3, ranks.sum() + size * 1j, np.complex64))
x = np.array([rank == 0, True, False])
communicator.all_reduce(on_device(x), ring.SUM)
check("any", x, [True, True, False])
x = np.array([rank == 0, True, False])
communicator.all_reduce(on_device(x), ring.PRODUCT)
check("all", x, [False, True, False])
x = np.full(4, 0x3F80 if rank else 0x4000, np.uint16)  # 1.0 and, on rank 0, 2.0
communicator.all_reduce(on_device(x, "bfloat16"), ring.MAX)
check("bfloat16", x, np.full(4, 0x4000, np.uint16))

for root in range(size):
    for dtype in STORAGE:
        x = np.full(3, rank + 1).astype(STORAGE[dtype])
        communicator.broadcast(on_device(x, dtype), root)
        check(f"broadcast {dtype}", x, np.full(3, root + 1).astype(STORAGE[dtype]))

for counts in ([2] * size, list(range(size))):
    mine, out = np.full(counts[rank], rank, np.int16), np.zeros(sum(counts), np.int16)
    communicator.all_gather(on_device(mine), on_device(out), counts)
    check("all_gather", out, np.repeat(ranks, counts))
    full, out = np.arange(sum(counts), dtype=np.float32) + rank, np.zeros(counts[rank], np.float32)
    communicator.reduce_scatter(on_device(full), on_device(out), counts, ring.AVERAGE)
    start = sum(counts[:rank])
    check("reduce_scatter", out, np.arange(start, start + counts[rank]) + (size - 1) / 2)

send_counts = [(rank + i) % size for i in range(size)]
out_counts = [(i + rank) % size for i in range(size)]
send, out = np.repeat(ranks + 10 * rank, send_counts).astype(np.int32), np.zeros(sum(out_counts), np.int32)
communicator.all_to_all(on_device(send), send_counts, on_device(out), out_counts)
check("all_to_all", out, np.repeat(rank + 10 * ranks, out_counts))

check("objects", communicator.all_gather_object(rank), ranks)
check("object", communicator.broadcast_object(rank, 1), 1)
communicator.barrier()

# Several in one group, and one while the caller goes on.
arrays = [np.full(n, rank, np.float32) for n in (3, 4)]
launches = len(library.log)
with communicator.group():
    for array in arrays:
        communicator.all_reduce(on_device(array), ring.SUM)
check("group", np.concatenate(arrays), np.full(7, ranks.sum(), np.float32))
report("launches", library.log[launches:])
library.delay = 0.1
x = np.full(5, rank, np.float32)
work = communicator.start("later", lambda: communicator.all_reduce(on_device(x), ring.SUM))
was_done, before = work.done(), x.copy()
work.wait()
check("before the wait", before, np.full(5, rank, np.float32))
check("after the wait", x, np.full(5, ranks.sum(), np.float32))
communicator.synchronize()
report("done", [was_done, work.done()])
report("kept", len(communicator.executor.queue.unfinished))
library.delay = 0.0

# Invalid arguments, which leave the communicator usable.
x, everything_to_0 = np.zeros(3, np.int16), [3] + [0] * (size - 1)
report(
    "errors",
    [
        raised(lambda: communicator.all_reduce(on_device(x), ring.SUM), ArgumentError),
        raised(lambda: communicator.all_reduce(on_device(x.astype(np.int32)), ring.AVERAGE), ArgumentError),
        raised(
            lambda: communicator.all_reduce(HostMemory(x.astype(np.float32), "float32"), ring.SUM),
            (ArgumentError, AttributeError),
        ),
        raised(lambda: communicator.broadcast(DeviceMemory(0, 0, "float32", 1), 0), ArgumentError),
        raised(lambda: communicator.broadcast(on_device(x), size), ArgumentError),
        raised(lambda: communicator.all_to_all(on_device(x), everything_to_0, on_device(x), [9] * size), ArgumentError),
        raised(lambda: communicator.allocate(1), ArgumentError),
    ],
)
load_nccl().version = 22300
report("float8", raised(lambda: communicator.all_reduce(DeviceMemory(1, 1, "float8_e5m2", 0), ring.SUM), ArgumentError))
load_nccl().version = 23203
x = np.ones(3, np.float32)
communicator.all_reduce(on_device(x), ring.SUM)
check("after rejections", x, np.full(3, size, np.float32))

# A capture keeps its memory alive, and its events are not asked about, though the watchdog asks about earlier ones. As
# a communicator's first operation it is rejected.
fresh = world.current().new_device_communicator("fresh", 0, streams)
library.cuda.capturing = True
report("captured", raised(lambda: fresh.all_reduce(on_device(x), ring.SUM), ArgumentError))
communicator.all_reduce(on_device(x), ring.SUM)
communicator.start("in a graph", lambda: communicator.all_reduce(on_device(x), ring.SUM)).wait()
communicator.executor.poll([])
report("kept by graphs", len(communicator.executor.queue.captured))
library.cuda.capturing = False
fresh.close()

# Ranks that share a GPU, or have different releases of NCCL.
same = "0000:01:00.0"
library.cuda.card = same
report("shared", raised(lambda: world.current().new_device_communicator("shared", 0, streams), DeviceError))
os.environ["RING_SHARE_GPU"] = "1"
shared = world.current().new_device_communicator("shared", 0, streams)
report("settings", os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE"))
x = np.full(3, rank, np.float32)
shared.all_reduce(on_device(x), ring.SUM)
check("shared card", x, np.full(3, ranks.sum(), np.float32))
shared.close()
load_nccl().version = 22704 if rank == 1 else 23203
report("versions", raised(lambda: world.current().new_device_communicator("versions", 0, streams), RingError))
load_nccl().version = 23203
library.cuda.devices = 0
report("no such GPU", raised(lambda: load_driver().bus_id(0), DeviceError))
library.cuda.devices = 1

# A start that never ends.
library.connects = rank != 1
os.environ["RING_START_TIMEOUT"] = "1"
report("start", raised(lambda: world.current().new_device_communicator("late", 0, streams), RingError))

# NCCL notices a failure between calls.
library.log.clear()
library.async_error = 6
while communicator.executor.connection.is_open:  # the monitor thread may be looking, and this one then does nothing
    communicator.executor.poll([])
library.async_error = 0
# Or it has heard of a failure that another rank noticed first.
report("noticed", raised(lambda: communicator.all_reduce(on_device(x), ring.SUM), RingError))
deadline = time.monotonic() + 60
while not library.log and time.monotonic() < deadline:  # another thread aborts
    time.sleep(0.001)
report("aborted", library.log)
report("failed", failed)
