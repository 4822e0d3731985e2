"""What a training step asks of CUDA and NCCL, ours and DDP's beside it: reports counts a step, by kind of training.

A row of the table in docs/gpu.md each, printed by rank 0.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import ring_plugins as ring
from ring_plugins.torch import GradientAverager
from ring_plugins.torch.rendezvous import store_from_world
from tests.gpu_rehearsal.devices import count
from tests.gpu_rehearsal.programs.models import Transformer, batch, loss_of
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
DEVICE = torch.device("cuda", ring.local_rank())
torch.cuda.set_device(DEVICE)
#: DDP times its first ten steps, for which the host waits.
WARM_UP, STEPS = 20, 20
#: What is shown -> the simulated libraries' names for it.
COUNTED = {
    "NCCL calls": ("ncclAllReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter"),
    "NCCL groups": ("NCCL kernels",),
    "bytes to NCCL": ("NCCL bytes",),
    "torch's operators": ("operators",),
    "copies on the device": ("copies on a device",),
    "copies to and from the host": ("copies to a device", "copies to the host"),
    "host waits": ("host waits",),
    "events recorded": ("cudaEventRecordWithFlags",),
    "stream waits": ("cudaStreamWaitEvent",),
}


def counts() -> dict[str, int]:
    return {what: sum(map(count, names)) for what, names in COUNTED.items()}


def measured(how: str) -> dict[str, float]:
    torch.manual_seed(1)
    model: nn.Module = Transformer(64, 4).to(DEVICE)
    averager = None
    call = model
    if how == "ours":
        averager = GradientAverager(model)
    elif how != "one process":
        call = nn.parallel.DistributedDataParallel(
            model, [DEVICE.index], gradient_as_bucket_view=how == "DDP, bucket views"
        )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = [tuple(part.to(DEVICE) for part in batch("transformer", step, ring.rank(), 4)) for step in range(4)]
    before: dict[str, int] = {}
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = counts()
        optimizer.zero_grad()
        loss_of(call, *batches[step % 4]).backward()
        optimizer.step()
    after = counts()
    torch.cuda.synchronize()
    found = {what: (after[what] - before[what]) / STEPS for what in COUNTED}
    found["peak MB of the step"] = round(torch.cuda.max_memory_allocated() / 1e6, 2)
    if averager is not None:
        averager.close()
    return found


store, rank, size = store_from_world()
dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=DEVICE)
columns = {how: measured(how) for how in ("one process", "ours", "DDP", "DDP, bucket views")}
dist.destroy_process_group()
for how, found in columns.items():
    report(how, found)
if ring.rank() == 0:
    print("| a step | " + " | ".join(columns) + " |")
    for what in columns["ours"]:
        print(f"| {what} | " + " | ".join(f"{found[what]:.10g}" for found in columns.values()) + " |", flush=True)
