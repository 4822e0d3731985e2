"""DDP over the "ring" process group, GradientAverager, and DistributedOptimizer give equal weights on all ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters
from tests.gpu_rehearsal.programs.models import batch, flat, loss_of, make
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
DEVICE = torch.device("cuda", ring.local_rank())
torch.cuda.set_device(DEVICE)
dist.init_process_group("ring")


def train(how: str, steps: int = 20) -> torch.Tensor:
    model = make("mlp").to(DEVICE)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    call: nn.Module = model
    if how == "DDP":
        call = nn.parallel.DistributedDataParallel(model, [DEVICE.index], bucket_cap_mb=1 / 16)
    else:
        optimizer = DistributedOptimizer(optimizer, model.named_parameters())
        broadcast_parameters(model)
    for step in range(steps):
        inputs, targets = (part.to(DEVICE) for part in batch("mlp", step, ring.rank(), 4))
        optimizer.zero_grad()
        loss_of(call, inputs, targets).backward()
        optimizer.step()
    return flat(model)


ours, theirs = train("DistributedOptimizer"), train("DDP")
report("finite", [bool(ours.isfinite().all()), bool(theirs.isfinite().all())])
report("unlike DDP", int((ours != theirs).sum()))
report("unlike rank 0", int((ours != ring.all_gather_object(ours)[0]).sum()))
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    x = torch.full((1000,), float(ring.rank() + 1), device=DEVICE)
    dist.all_reduce(x)
    y = x * 2
side.synchronize()
report("on another stream", y[0].item())
work = dist.all_reduce(z := torch.ones(5, device=DEVICE), async_op=True)
work.wait()
report("asynchronous", z.cpu().tolist())
dist.destroy_process_group()
