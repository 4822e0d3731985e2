"""Ranks are killed while GPUs train, and the others go on with the weights of a replay: `heals.py RANK:POINT:STEP ...`.

With TEST_ON_FAILURE=replace, processes take their places, and training ends six steps after all have been filled. The
replay averages gradients of the same batches by hand, in one process, over those with whom the averages of each step
were taken. deaths.py has the points.
"""

import os
import sys

import torch
from torch import nn

import ring_plugins as ring
import ring_plugins.horovod.torch as hvd
from ring_plugins.core.world import current
from ring_plugins.torch import DistributedOptimizer, TrainingState, broadcast_parameters
from tests.gpu_rehearsal.programs.deaths import Deaths
from tests.worker import report

RANKS, STEPS = int(os.environ["TEST_RANKS"]), int(os.environ.get("TEST_STEPS", "6"))
REPLACES = os.environ.get("TEST_ON_FAILURE") == "replace"
ring.init(ranks=RANKS, on_failure="replace" if REPLACES else "continue")
SLOT, IS_NEW = ring.rank(), current().is_joining
DEVICE = torch.device("cuda", SLOT)
torch.cuda.set_device(DEVICE)
deaths = Deaths([] if IS_NEW else sys.argv[1:], SLOT)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 700), nn.Tanh(), nn.Linear(700, 600), nn.Tanh(), nn.Linear(600, 4))


def batch(slot: int, step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + slot))


model = network().to(DEVICE)
broadcast_parameters(model)
optimizer = DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.1, 0.9), model.named_parameters(), bucket_bytes=1 << 16
)
deaths.follow(model[2], model[4].weight)
state = TrainingState(model=model, optimizer=optimizer, step=0, last=0 if REPLACES else STEPS, history=[])
taken = 0
while not state.last or state.step < state.last:
    if REPLACES and ring.size() < RANKS:
        state.last = 0
    elif not state.last:
        state.last = state.step + STEPS
    optimizer.zero_grad(set_to_none=state.step % 2 == 0)
    deaths.begin(state.step)
    model(batch(SLOT, state.step).to(DEVICE)).square().mean().backward()
    deaths.at("update")
    state.history.append([current().members.known[rank].slot for rank in deaths.averaged])
    optimizer.step()
    state.step += 1
    taken += 1
    if REPLACES:
        state.commit()

replay = network()
again = torch.optim.SGD(replay.parameters(), 0.1, 0.9)
for step, slots in enumerate(state.history):
    gradients = []
    for slot in slots:
        replay.zero_grad()
        replay(batch(slot, step)).square().mean().backward()
        gradients.append([p.grad * (1 / len(slots)) for p in replay.parameters()])
    for parameter, *parts in zip(replay.parameters(), *gradients, strict=True):
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        parameter.grad = total
    again.step()
ours = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
theirs = torch.cat([p.detach().flatten() for p in replay.parameters()])
everywhere = ring.all_gather_object((ours, state.history))
report("size", ring.size())
report("steps", len(state.history))
report("last", state.history[-1])
report("is new", IS_NEW)
report("taken", taken)
report("unlike rank 0", int((ours != everywhere[0][0]).sum()) + (state.history != everywhere[0][1]))
report("unlike the replay", int((ours != theirs).sum()))
report("largest difference", float((ours - theirs).abs().max()))
hvd.join()  # ranks that have run unlike numbers of operations tell each other of rejected ones
for step in range(state.step, state.step + 12):
    optimizer.zero_grad()
    model(batch(SLOT, step).to(DEVICE)).square().mean().backward()
    optimizer.step()
report("after join", ring.all_reduce(torch.ones(1, device=DEVICE), ring.SUM).item())
ring.shutdown()
