"""A process takes the place of a killed rank on its GPU: `replaces.py RANK:POINT:STEP ...`, of heals.py's points.

All members end with equal weights, and the new process has taken part in averages.
"""

import os
import signal
import sys

import torch
from torch import nn

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.torch import DistributedOptimizer, TrainingState, broadcast_parameters
from tests.worker import report

RANKS = int(os.environ["TEST_RANKS"])
ring.init(ranks=RANKS, on_failure="replace")
DEVICE = torch.device("cuda", ring.rank())
torch.cuda.set_device(DEVICE)
IS_NEW = current().is_joining
FAULTS = {} if IS_NEW else {(int(r), int(s)): point for r, point, s in (one.split(":") for one in sys.argv[1:])}
OWN, NOW = ring.rank(), ""


def die_at(point: str) -> None:
    if point == NOW:
        os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 700), nn.Tanh(), nn.Linear(700, 600), nn.Tanh(), nn.Linear(600, 4)).to(DEVICE)
broadcast_parameters(model)
optimizer = DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.1, 0.9), model.named_parameters(), bucket_bytes=1 << 16
)
model[2].register_full_backward_hook(lambda *_: die_at("backward"))
state = TrainingState(model=model, optimizer=optimizer, step=0, last=0)
taken = 0
while not state.last or state.step < state.last:  # six steps with all places filled
    if ring.size() < RANKS:
        state.last = 0
    elif not state.last:
        state.last = state.step + 6
    NOW = FAULTS.get((OWN, state.step), "")
    optimizer.zero_grad()
    die_at("forward")
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * state.step + ring.rank()))
    model(inputs.to(DEVICE)).square().mean().backward()
    optimizer.step()
    state.step += 1
    taken += 1
    state.commit()
weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
everywhere = ring.all_gather_object((weights, state.step))
report("size", ring.size())
report("is new", IS_NEW)
report("taken", taken)
report("finite", bool(weights.isfinite().all()))
report("unlike rank 0", int((weights != everywhere[0][0]).sum()) + (state.step != everywhere[0][1]))
ring.shutdown()
