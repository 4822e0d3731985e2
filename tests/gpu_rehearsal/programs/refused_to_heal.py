"""What no GPU job that goes on when ranks are lost can have: each raises on every rank, and training goes on.

`refused_to_heal.py alone CASE`: the last rank alone asks for it, and all hear of that.
"""

import os
import sys
import time

import torch
from torch import nn

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, GradientAverager
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure="continue")
torch.cuda.set_device(ring.local_rank())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def backward(model: nn.Module) -> None:
    weight = next(model.parameters())
    model(torch.ones(3, 4, device=weight.device)).square().mean().backward()


def compressed(model: nn.Module) -> None:
    GradientAverager(model, compression="bf16")
    backward(model)


def sharded(model: nn.Module) -> None:
    optimizer = DistributedOptimizer(optimizer_of(model), model.named_parameters(), shard=True)
    backward(model)
    optimizer.step()


def grouped(model: nn.Module) -> None:
    ring.Group([ring.rank()])


def sparse(model: nn.Module) -> None:
    embedding = nn.Embedding(5, 4, sparse=True).cuda()
    GradientAverager(embedding, sparse="gather")
    embedding(torch.tensor([1, 2], device="cuda")).sum().backward()


def ordinary(model: nn.Module) -> None:
    GradientAverager(model)
    backward(model)
    torch.cuda.synchronize()
    ring.barrier()


cases = (compressed, sharded, grouped, sparse)
if sys.argv[1:2] == ["alone"]:
    chosen = next(case for case in cases if case.__name__ == sys.argv[2])
    cases = (chosen if ring.rank() == ring.size() - 1 else ordinary,)
for case in cases:
    name = sys.argv[2] if sys.argv[1:] else case.__name__
    try:
        case(nn.Linear(4, 2).cuda())
        report(name, "")
    except ring.RingError as error:
        report(name, str(error))
if sys.argv[1:]:
    time.sleep(30 if ring.rank() == ring.size() - 1 else 0)  # no other rank hears of it because this one has ended
    os._exit(0)
torch.manual_seed(1)
model = nn.Linear(4, 2).to("cpu" if "NCCL_COMM_BLOCKING" in os.environ else "cuda")
optimizer = DistributedOptimizer(optimizer_of(model), model.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
report("finite", bool(model.weight.isfinite().all()))
os._exit(0)
