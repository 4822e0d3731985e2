"""Ranks are killed while GPUs train, and the others go on with the weights of a replay: `heals.py RANK:POINT:STEP ...`.

A rank kills itself in a step: in "forward", before its "first" bucket is launched, in the middle of "backward", at its
"end" before it waits, "after" it has told the others that its GPU is done, or before its "update". The replay averages
gradients of the same batches by hand, in one process, over those with whom the averages of each step were taken.
"""

import os
import signal
import sys

import torch
from torch import nn

import ring_plugins as ring
from ring_plugins.core.gpu.recovery import GpuRecovery
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters
from tests.worker import report

RANKS, STEPS = int(os.environ["TEST_RANKS"]), int(os.environ.get("TEST_STEPS", "6"))
ring.init(ranks=RANKS, on_failure="continue")
OWN = ring.rank()
DEVICE = torch.device("cuda", OWN)
torch.cuda.set_device(DEVICE)
FAULTS = {(int(rank), int(step)): point for rank, point, step in (one.split(":") for one in sys.argv[1:])}
NOW = ""
averaged = [OWN]


def die_at(point: str) -> None:
    if point == NOW:
        os.kill(os.getpid(), signal.SIGKILL)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 700), nn.Tanh(), nn.Linear(700, 600), nn.Tanh(), nn.Linear(600, 4))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))


model = network().to(DEVICE)
broadcast_parameters(model)
optimizer = DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.1, 0.9), model.named_parameters(), bucket_bytes=1 << 16
)
model[2].register_full_backward_hook(lambda *_: die_at("backward"))
model[4].weight.register_hook(lambda gradient: die_at("first"))
wait_for, settle = GpuRecovery.wait_for, GpuRecovery._settle


def wait_for_averages(recovery: GpuRecovery, *args) -> None:
    die_at("end")
    wait_for(recovery, *args)
    averaged[:] = recovery._host.ranks  # a rank that dies from now on has taken part


GpuRecovery.wait_for = wait_for_averages
GpuRecovery._settle = lambda *args: (settle(*args), die_at("after"))[0]
history = []
for step in range(STEPS):
    NOW = FAULTS.get((OWN, step), "")
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    die_at("forward")
    model(batch(OWN, step).to(DEVICE)).square().mean().backward()
    die_at("update")
    history.append(list(averaged))
    optimizer.step()

replay = network()
again = torch.optim.SGD(replay.parameters(), 0.1, 0.9)
for step, ranks in enumerate(history):
    gradients = []
    for rank in ranks:
        replay.zero_grad()
        replay(batch(rank, step)).square().mean().backward()
        gradients.append([p.grad * (1 / len(ranks)) for p in replay.parameters()])
    for parameter, *parts in zip(replay.parameters(), *gradients, strict=True):
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        parameter.grad = total
    again.step()
ours = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
theirs = torch.cat([p.detach().flatten() for p in replay.parameters()])
everywhere = ring.all_gather_object((ours, history))
report("steps", len(history))
report("last", history[-1])
report("unlike rank 0", int((ours != everywhere[0][0]).sum()) + (history != everywhere[0][1]))
report("unlike the replay", int((ours != theirs).sum()))
report("largest difference", float((ours - theirs).abs().max()))
ring.shutdown()
