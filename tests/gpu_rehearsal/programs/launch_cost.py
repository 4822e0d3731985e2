"""What the host pays to launch a bucket: our own code and the simulated C libraries, without torch.

    eval "$(python -m tests.gpu_rehearsal.build)"; python -m tests.gpu_rehearsal.programs.launch_cost

Each rank starts a bucket of ten numbers and lets its stream wait for it, as a backward does, alone and beside a thread
that computes in Python, which a data loader or a logger may have. The simulated NCCL has a real one's thread for each
group of a nonblocking communicator, which NCCL_COMM_BLOCKING=0 makes. RING_SIMULATED_LAUNCH=40 lets launching kernels
take 40 µs.
"""

import ctypes
import os
import statistics
import threading
import time

import ring_plugins as ring
from ring_plugins.core import world
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.gpu import load_driver, load_nccl
from tests.gpu_rehearsal.programs.bare_streams import Streams
from tests.worker import report

LAUNCHES, ROUNDS = 200, int(os.environ.get("TEST_ROUNDS", "5"))


ring.init(ranks=int(os.environ.get("TEST_RANKS", "2")))
driver, device = load_driver(), ring.local_rank()
communicator = world.current().new_device_communicator("gradients", device, Streams(driver.new_stream(device)))
pointer = ctypes.c_void_p()
with driver.device(device):
    load_nccl().call("ncclMemAlloc", ctypes.byref(pointer), 64)
memory = DeviceMemory(int(pointer.value or 0), 10, "float32", device, None, 4)


def launch_times() -> list[float]:
    """Microseconds of each launch."""
    times = []
    for _ in range(LAUNCHES):
        began = time.perf_counter()
        communicator.start("bucket", lambda: communicator.all_reduce(memory, Op.SUM)).wait()
        times.append((time.perf_counter() - began) * 1e6)
    communicator.synchronize()
    ring.barrier()
    return times


def compute_until(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(500))


launch_times()
found: dict[str, list[float]] = {"alone": [], "beside a busy thread": []}
for _ in range(ROUNDS):
    found["alone"] += launch_times()
    over = threading.Event()
    thread = threading.Thread(target=compute_until, args=(over,))
    thread.start()
    found["beside a busy thread"] += launch_times()
    over.set()
    thread.join()
for where, times in found.items():
    tenths = statistics.quantiles(times, n=10)
    text = f"{where}: median {tenths[4]:.0f} µs, a tenth below {tenths[0]:.0f}, a tenth above {tenths[8]:.0f}"
    if "TEST_REPORTS" in os.environ:
        report(where, text)
    if ring.rank() == 0:
        print(f"launch of a bucket {text}", flush=True)
ring.shutdown()
