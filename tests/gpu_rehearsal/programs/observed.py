"""What is seen of a training on GPUs: a step that all skip, a timeline, the step breakdown, and who is waited for."""

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import ring_plugins as ring
from ring_plugins.torch import BalanceMonitor, DistributedOptimizer, Timeline
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
OWN = ring.rank()
torch.cuda.set_device(ring.local_rank())
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 4)).cuda()
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())


def step(number: int) -> None:
    optimizer.zero_grad()
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * number + OWN)).cuda()
    if number == 2 and OWN == 1:
        torch.zeros(1 << 40, device="cuda")
    model(inputs).square().mean().backward()
    optimizer.step()


skipped = []
for number in range(5):
    with optimizer.skip_step_on(torch.cuda.OutOfMemoryError) as whole:
        step(number)
    if whole.skipped:
        skipped.append([number, whole.reason])
weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
report("skipped", skipped)
report("unlike rank 0", int((weights != ring.all_gather_object(weights)[0]).sum()) + int((~weights.isfinite()).sum()))

with BalanceMonitor() as balance:
    for number in range(10, 130):
        step(number)
    figures = balance.figures(wait=True)
report("figures", figures)

directory = os.environ["TEST_TRACES"]
with Timeline(directory):
    for number in range(200, 206):
        step(number)
    torch.cuda.synchronize()
if OWN == 0:
    events = json.loads((Path(directory) / "timeline.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    on_gpus = [event for event in events if event.get("cat") == "gpu" and event.get("ph") == "X"]
    report("on GPUs", [sorted({event["pid"] for event in on_gpus}), len(on_gpus), min(e["dur"] for e in on_gpus) >= 0])

x = torch.full((1000,), OWN + 1.0, device="cuda")
ring.all_reduce(x)  # connects
ring.barrier()
if OWN == 1:  # until rank 0 has reported it
    told = Path(directory) / "told"
    while not told.exists():
        time.sleep(0.05)
if OWN == 0:
    import logging

    class Tells(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "stalled for" in record.getMessage():
                report("stall", record.getMessage())
                (Path(directory) / "told").touch()

    logging.getLogger("ring_plugins").addHandler(Tells())
report("average", float(ring.all_reduce(x)[0]))
