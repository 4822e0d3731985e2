"""FSDP2 over the "ring" process group and over torch's own "nccl": the same shards, bit for bit, on every rank."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ring_plugins as ring
import ring_plugins.torch
from ring_plugins.torch.rendezvous import store_from_world
from tests.gpu_rehearsal.programs.models import batch, loss_of, make
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
DEVICE = torch.device("cuda", ring.local_rank())
torch.cuda.set_device(DEVICE)


def train(name: str, steps: int = 8) -> torch.Tensor:
    model = make(name).to(DEVICE)
    for part in model.children():
        if any(True for _ in part.parameters()):
            fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(steps):
        inputs, targets = (part.to(DEVICE) for part in batch(name, step, ring.rank(), 4))
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    whole = [p.full_tensor().detach().double().flatten().cpu() for p in model.parameters()]
    return torch.cat(whole)


dist.init_process_group("ring")
ours = train("mlp")
dist.destroy_process_group()
store, rank, size = store_from_world()
dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=DEVICE)
theirs = train("mlp")
dist.destroy_process_group()
report("finite", bool(ours.isfinite().all()))
report("moved", bool((ours - torch.cat([p.detach().double().flatten() for p in make("mlp").parameters()])).any()))
report("unlike nccl", int((ours != theirs).sum()))
report("unlike rank 0", int((ours != ring.all_gather_object(ours)[0]).sum()))
