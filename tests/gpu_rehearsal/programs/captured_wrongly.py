"""Captures that cannot work, each in a process of its own: `captured_wrongly.py first|continue|missing|alone`.

Without ordinary steps before, in a job that goes on when ranks are lost, with a parameter that gets no gradient, or on
one rank while the other takes ordinary steps.
"""

import os
import sys

import torch
from torch import nn

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer
from tests.worker import report

case = sys.argv[1]
ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure="continue" if case == "continue" else "end")
torch.cuda.set_device(ring.local_rank())
torch.manual_seed(1)
used, unused = nn.Linear(6, 5).cuda(), nn.Linear(3, 2).cuda()
optimizer = DistributedOptimizer(torch.optim.SGD([*used.parameters(), *unused.parameters()], 0.1))
x, side = torch.ones(4, 6, device="cuda"), torch.cuda.Stream()


def step(leaves_out: bool) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss = used(x).square().mean()
    if not leaves_out:
        loss = loss + unused(x[:, :3]).square().mean()
    loss.backward()
    optimizer.step()


side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(0 if case == "first" else 4):
        step(False)
torch.cuda.current_stream().wait_stream(side)
try:
    graph = torch.cuda.CUDAGraph()
    if case != "alone" or ring.rank():
        with torch.cuda.graph(graph):
            step(case == "missing")
    for _ in range(30 if case == "alone" else 0):
        graph.replay() if ring.rank() else step(False)
        torch.cuda.synchronize()
        optimizer.averager.check()
    report("error", "")
except Exception as error:  # torch's, about a capture that is not whole, in the context of ours
    found: BaseException | None = error
    while found is not None and not isinstance(found, ring.RingError):
        found = found.__context__
    report("error", str(found or error))
    if case == "alone":
        raise
os._exit(0)
