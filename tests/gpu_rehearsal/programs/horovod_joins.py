"""Operations on GPUs while a rank is in Horovod's join: named ones get zeros, others are errors; `... CASE`."""

import os
import sys

import torch

import ring_plugins as ring
import ring_plugins.horovod.torch as hvd
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
hvd.init()
DEVICE = torch.device("cuda", hvd.local_rank())
torch.cuda.set_device(DEVICE)
x = torch.full((4,), 6.0, device=DEVICE)


def named() -> None:
    """Also the mends of operations on GPUs: what they scale by, and where results and zeros are."""
    half = hvd.allreduce(x.half(), prescale_factor=0.1, postscale_factor=3.0)
    splits = torch.tensor([1, 3] if hvd.rank() == 0 else [2, 2], device=DEVICE)
    rows, received = hvd.alltoall(x, splits)
    report("factors", [half.dtype == torch.float16, str(half.device), (half - 1.8).abs().max().item() < 2e-3])
    report("splits", [rows.device == DEVICE, received.device == DEVICE, received.tolist(), len(rows)])
    for first in range(2):
        if hvd.rank() != first:
            report("zeros", hvd.allreduce(x, name="x").tolist())
        report("last", hvd.join(hvd.local_rank()))
    report("after", hvd.allreduce(x).tolist())


def waits() -> None:
    hvd.allreduce(x)
    if hvd.rank():
        hvd.allreduce(x)
    hvd.join()


def starts() -> None:
    """The rank that comes last is in `join` before anything tells it of its mistake."""
    hvd.allreduce(x)
    if hvd.rank():
        handle = hvd.allreduce_async(x)
    hvd.join()
    report("wrong", hvd.allreduce(x).tolist())
    report("handle", hvd.synchronize(handle).tolist())


def optimizer() -> None:
    model = torch.nn.Linear(4, 3).to(DEVICE)
    hvd.broadcast_parameters(model.state_dict(), 0)
    distributed = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for _ in range(3 + hvd.rank()):
        distributed.zero_grad()
        model(x * (1 + hvd.rank())).square().mean().backward()
        distributed.step()
    hvd.join()


case = sys.argv[1]
try:
    {"named": named, "waits": waits, "starts": starts, "optimizer": optimizer}[case]()
    report("error", "none")
except ring.RingError as error:
    report("error", f"{type(error).__name__}: {error}")
    raise
