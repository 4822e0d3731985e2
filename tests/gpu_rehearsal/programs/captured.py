"""Steps captured into a CUDA graph and replayed train to the bits of ordinary ones, and of DDP's captured ones.

The graph holds the forward, the backward with NCCL's kernels in it, and the optimizer's step: `captured.py MODEL ...`.
"""

import os
import sys

os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # as torch's page on CUDA graphs asks for DDP

import torch
import torch.distributed as dist
from torch import nn

import ring_plugins as ring
from ring_plugins.torch import GradientAverager
from ring_plugins.torch.rendezvous import store_from_world
from tests.gpu_rehearsal.programs.models import batch, flat, loss_of, make
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
ORDINARY, REPLAYED = 11, 14  # DDP needs eleven
DEVICE = torch.device("cuda", ring.local_rank())
torch.cuda.set_device(DEVICE)


def train(name: str, how: str, captures: bool) -> torch.Tensor:
    """The weights after all steps."""
    own = make(name).to(DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if how == "ring":
            averager = GradientAverager(own, bucket_bytes=1 << 16, first_bucket_bytes=1 << 12)
            call = own
        else:
            call = nn.parallel.DistributedDataParallel(
                own, [DEVICE.index], bucket_cap_mb=1 / 16, forward_sync_buffers=False
            )
    torch.cuda.current_stream().wait_stream(side)
    optimizer = torch.optim.SGD(own.parameters(), 0.05, 0.9)
    fixed = [part.to(DEVICE) for part in batch(name, 0, ring.rank(), 4)]

    def give(step: int) -> None:
        for to, part in zip(fixed, batch(name, step, ring.rank(), 4), strict=True):
            to.copy_(part)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(call, *fixed).backward()
        optimizer.step()

    with torch.cuda.stream(side):
        for number in range(ORDINARY):
            give(number)
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if captures:
        with torch.cuda.graph(graph):
            step()
    for number in range(ORDINARY, ORDINARY + REPLAYED):
        give(number)
        graph.replay() if captures else step()
    torch.cuda.synchronize()
    weights = flat(own)
    if how == "ring":
        averager.close()
    return weights


store, rank, size = store_from_world()
dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=DEVICE)
for name in sys.argv[1:]:
    replayed, ordinary = train(name, "ring", True), train(name, "ring", False)
    theirs = train(name, "DDP", True)
    everywhere = ring.all_gather_object(replayed)
    report(
        name,
        {
            "finite": bool(replayed.isfinite().all()),
            "unlike ordinary steps": int((replayed != ordinary).sum()),
            "unlike DDP": int((replayed != theirs).sum()),
            "unlike rank 0": int((replayed != everywhere[0]).sum()),
            "moved": float((replayed - flat(make(name))).abs().max()) > 0,
        },
    )
dist.destroy_process_group()
