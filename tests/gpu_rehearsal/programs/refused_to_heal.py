"""What no GPU job that goes on when ranks are lost can have: each raises on every rank, and training goes on."""

import os

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
    model(torch.ones(3, 4, device="cuda")).square().mean().backward()


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


for case in (compressed, sharded, grouped, sparse):
    try:
        case(nn.Linear(4, 2).cuda())
        report(case.__name__, "")
    except ring.RingError as error:
        report(case.__name__, str(error))
torch.manual_seed(1)
model = nn.Linear(4, 2).cuda()
optimizer = DistributedOptimizer(optimizer_of(model), model.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
report("finite", bool(model.weight.isfinite().all()))
os._exit(0)
