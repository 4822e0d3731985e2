"""What was wrong before anything ran on a GPU, each as a script sees it: reports what it finds, by defect."""

import gc
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters
from tests.gpu_rehearsal.devices import count
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
OWN, SIZE = ring.rank(), ring.size()
DEVICE = torch.device("cuda", ring.local_rank())
torch.cuda.set_device(DEVICE)


def every_type() -> None:
    """The root's bytes reach all, of types that NCCL does not know, too."""
    types = (torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex32, torch.complex64)
    model = nn.Module()
    for number, dtype in enumerate(types):
        model.register_buffer(f"of_{number}", torch.full((64,), OWN + 1, dtype=torch.uint8, device=DEVICE).view(dtype))
    broadcast_parameters(model)
    found = [set(buffer.cpu().view(torch.uint8).tolist()) for buffer in model.buffers()]
    report("types", [one == {1} for one in found])


def dropped_destinations() -> None:
    """What an operation writes to at its end is kept until then, though the script has dropped tensor and work."""
    wrong = 0
    for _ in range(20):
        x = torch.ones(64, 96, device=DEVICE).t()
        dist.all_reduce(x, async_op=True)
        del x
        gc.collect()
        others = [torch.zeros(96, 64, device=DEVICE) for _ in range(3)]  # some where the tensor was
        torch.cuda.synchronize()
        wrong += sum(int((one != 0).sum()) for one in others)
    report("overwritten", wrong)


def futures() -> None:
    """Nobody pays for a future that was not asked for: torch pickles what it is to hold."""
    made = 0
    extract = torch._jit_internal._extract_tensors

    def counted(*args: object) -> object:
        nonlocal made
        made += 1
        return extract(*args)

    torch._jit_internal._extract_tensors = counted
    works = [dist.all_reduce(torch.ones(8, device=DEVICE), async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    unasked = made
    future = works[0].get_future().wait()
    report("futures", [unasked, made > 0, future[0].tolist() == [SIZE] * 8])
    torch._jit_internal._extract_tensors = extract


def threads_of_messages() -> None:
    """No rank but the first comes to GPU 0, where it would take hundreds of megabytes."""
    before = count("contexts of device 0")
    right, left = (OWN + 1) % SIZE, (OWN - 1) % SIZE
    received = torch.zeros(3, device=DEVICE)
    works = [dist.isend(torch.full((3,), float(OWN), device=DEVICE), right), dist.irecv(received, left)]
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    report("message", received.tolist() == [left] * 3)
    report("visits of GPU 0", count("contexts of device 0") - before if OWN else 0)


def live_graph() -> None:
    """Closing what a graph has captured calls nothing of NCCL's, which would wait for the graph, for ever."""
    model = nn.Linear(6, 5).to(DEVICE)
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    x, side, graph = torch.ones(4, 6, device=DEVICE), torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    ends = ("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort")
    before = sum(map(count, ends))
    optimizer.close()
    report("ends of a captured communicator", sum(map(count, ends)) - before)
    graph.replay()
    torch.cuda.synchronize()
    report("replayed", bool(model.weight.isfinite().all()))
    globals()["graph"] = graph  # as scripts do, until the process ends


dist.init_process_group("ring")
checks: tuple[Callable[[], None], ...] = (every_type, dropped_destinations, futures, threads_of_messages, live_graph)
for check in checks:
    check()
report("threads of NCCL's", count("NCCL threads"))
dist.destroy_process_group()
