"""GradientAverager and DDP, on torch's own NCCL backend, train to the same bits: `equals_ddp.py MODEL:HOW ...`.

HOW is float32, bfloat16, autocast; scaled (by a GradScaler, with an overflow on one rank), accumulated (two passes a
step, the first without communication), or compressed (to bfloat16 on the way, in DDP by its hook). Every rank has a
device of its own and its own batches. Reports, for each model and precision, what differs.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import ring_plugins as ring
from ring_plugins.torch import GradientAverager
from ring_plugins.torch.rendezvous import store_from_world
from tests.gpu_rehearsal.programs.models import batch, flat, loss_of, make
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
STEPS = int(os.environ.get("TEST_STEPS", "50"))
DEVICE = torch.device("cuda", ring.rank())  # all virtual hosts are one machine
torch.cuda.set_device(DEVICE)


def train(how: str, name: str, precision: str) -> torch.Tensor:
    """The weights after all steps."""
    own = make(name).to(DEVICE, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    averager, call = None, own
    if how == "ring":
        codec = "bf16" if precision == "compressed" else None
        averager = GradientAverager(own, bucket_bytes=1 << 16, first_bucket_bytes=1 << 12, compression=codec)
        no_sync = averager.no_sync
    else:
        ddp = nn.parallel.DistributedDataParallel
        call = ddp(own, [DEVICE.index], bucket_cap_mb=1 / 16, forward_sync_buffers=False)
        no_sync = call.no_sync
        if precision == "compressed":
            call.register_comm_hook(None, bf16_compress_hook)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=9, enabled=precision == "scaled")
    optimizer = (
        torch.optim.Adam(own.parameters(), 1e-3) if name != "cnn" else torch.optim.SGD(own.parameters(), 0.05, 0.9)
    )
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for accumulates in (True, False) if precision == "accumulated" else (False,):
            inputs, targets = (part.to(DEVICE) for part in batch(name, 2 * step + accumulates, ring.rank(), 4))
            if precision == "bfloat16" and inputs.is_floating_point():
                inputs = inputs.bfloat16()
            with no_sync() if accumulates else contextlib.nullcontext():
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
                    loss = loss_of(call, inputs, targets)
                if precision == "scaled" and step == 5 and ring.rank() == 0:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if averager is not None:
        averager.close()
    return flat(own)


store, rank, size = store_from_world()
dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=DEVICE)
for run in sys.argv[1:]:
    name, precision = run.split(":")
    ours, theirs = train("ring", name, precision), train("DDP", name, precision)
    weights = [p.numel() for p in make(name).parameters()]
    everywhere = ring.all_gather_object(ours)
    report(
        run,
        {
            "finite": bool(ours.isfinite().all()),
            "unlike DDP": int((ours != theirs).sum()),
            "largest": float((ours - theirs).abs().max()),
            "moved": float((ours - flat(make(name))).abs().max()) > 0,
            "unlike rank 0": 0 if name == "cnn" else int((ours != everywhere[0]).sum()),  # it has statistics of its own
            "of": sum(weights),
        },
    )
dist.destroy_process_group()
