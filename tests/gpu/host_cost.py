"""What a bucket costs the host, and how many launches, copies and waits a step makes: ours and DDP's.

NCCL_COMM_BLOCKING=0 makes NCCL queue kernels in threads of its own, to be compared with the calling thread.
"""

import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.world import current
from ring_plugins.torch import GradientAverager
from ring_plugins.torch.device import memory_of, streams
from tests.gpu.card import CUDA, DEVICE, SIMULATED, dist, fact, init_torch_group, ring, synchronize, torch

nn = torch.nn
ROUNDS, CALLS = 4, 20  # after each round the GPU catches up


def median_us(call: Callable[[], object], catch_up: Callable[[], None]) -> int:
    """Microseconds of a call on the host, without waiting for the GPU."""
    found = []
    for _ in range(ROUNDS):
        for _ in range(CALLS):
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
        catch_up()
    return round(statistics.median(found) * 1e6)


def cost_of_buckets() -> None:
    communicator = current().new_device_communicator("cost", DEVICE.index or 0, streams(DEVICE.index or 0))
    tensors = [torch.ones(256, device=DEVICE) for _ in range(10)]

    def cost(count: int) -> int:
        def operate() -> None:
            with communicator.group():
                for tensor in tensors[:count]:
                    communicator.all_reduce(memory_of(tensor), Op.SUM)

        return median_us(lambda: communicator.start("cost", operate), communicator.synchronize)

    def torchs() -> int:
        works: list[object] = []

        def catch_up() -> None:
            for work in works:
                work.wait()
            works.clear()
            synchronize()

        return median_us(lambda: works.append(dist.all_reduce(tensors[0], async_op=True)), catch_up)

    cost(1), torchs()
    result = {"main, 1 tensor": cost(1), "main, 10 tensors": cost(10), "torch's group": torchs()}
    thread = threading.Thread(target=lambda: result.update({"thread, 1 tensor": cost(1)}))
    thread.start()
    thread.join()
    fact(check="host us a bucket", blocking=os.environ.get("NCCL_COMM_BLOCKING", "1"), **result)
    communicator.close()


def calls_of_a_step(how: str) -> None:
    torch.manual_seed(0)  # equal weights on all ranks
    own = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)) for _ in range(30))).to(DEVICE)
    averager = GradientAverager(own, bucket_bytes=1 << 20) if how == "ring" else None
    call = own
    if how == "DDP":
        call = nn.parallel.DistributedDataParallel(own, [DEVICE.index] if CUDA else None, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(own.parameters(), 1e-3)
    x, host = torch.randn(16, 256, device=DEVICE), []

    def step() -> None:
        synchronize()
        ring.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()
        host.append(time.perf_counter() - began)
        synchronize()

    for _ in range(8):
        step()
    cpu = [torch.profiler.ProfilerActivity.CPU] if SIMULATED else None  # CUPTI is not simulated
    with torch.profiler.profile(activities=cpu) as profile:
        for _ in range(3):
            step()
    names = Counter(
        event.name
        for event in profile.events()
        if event.name.startswith(("cuda", "cuLaunch", "cuMem", "cuStream", "cuEvent"))
    )
    if averager is not None:
        averager.close()
    fact(
        check="calls of a step",
        how=how,
        host_ms=round(statistics.median(host[3:8]) * 1e3, 2),
        calls={name: count // 3 for name, count in names.most_common(12)},
    )


init_torch_group()
cost_of_buckets()
for how in ("plain", "ring", "DDP"):
    calls_of_a_step(how)
dist.destroy_process_group()
