"""The loss on scanned digits with and without 16-bit compression, and the bytes that leave a rank.

    mpirun -n 4 python benchmarks/half_wire.py        # half a minute

The ranks count as two hosts with two ranks each. Weights, batches and steps are the same in every run; writes
benchmarks/results.
"""

from __future__ import annotations

import os

os.environ.setdefault("RING_VIRTUAL_NODES", "2")

import torch
from measure import count_bytes, machine, save
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer

RUNS = {
    "no compression": {},
    "fp16": {"compression": "fp16"},
    "bf16": {"compression": "bf16"},
    "bf16, error feedback": {"compression": "bf16", "error_feedback": True},
    "int8": {"compression": "int8"},
}
STEPS, BATCH = 300, 32


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def train(options: dict[str, object]) -> list[float]:
    """Train, and return the loss of each step, averaged over all ranks."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    model = network()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9), model.named_parameters(), **options)
    order = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        rows = torch.randint(0, len(labels), (ring.size(), BATCH), generator=order)[ring.rank()]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(float(ring.all_reduce(loss.detach())))
    optimizer.close()
    return losses


def main() -> None:
    torch.set_num_threads(1)  # test hosts share the cores of this machine
    ring.init()
    sent = count_bytes()
    losses, nbytes = {}, {}
    for name, options in RUNS.items():
        before = sent[0]
        losses[name] = train(options)
        nbytes[name] = sent[0] - before
    if ring.rank() == 0:
        for name, values in losses.items():
            last = sum(values[-20:]) / 20
            print(f"{name}: loss {last:.4f}, {nbytes[name] / STEPS / 1e6:.3f} MB per step to the other host")
        save("half_wire", {"losses": losses, "bytes": nbytes, "steps": STEPS})
        print(machine())


if __name__ == "__main__":
    main()
