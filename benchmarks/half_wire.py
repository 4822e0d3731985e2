"""The loss on scanned digits with and without 16-bit compression, and the bytes that leave a rank.

    mpirun -n 4 python benchmarks/half_wire.py        # half a minute

The ranks count as two hosts with two ranks each. Weights, batches and steps are the same in every run; writes
benchmarks/results and docs/pictures/compression.png.
"""

from __future__ import annotations

import os

os.environ.setdefault("RING_VIRTUAL_NODES", "2")

import torch
from measure import RESULTS, machine, save
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.torch import DistributedOptimizer

RUNS = {
    "no compression": {},
    "fp16": {"compression": "fp16"},
    "bf16": {"compression": "bf16"},
    "bf16, error feedback": {"compression": "bf16", "error_feedback": True},
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


def count_bytes() -> list[int]:
    """Return a list with one number, the bytes that this rank has sent to other hosts so far."""
    sent, transport = [0], current()._rendezvous.transport
    assert transport is not None
    exchange = transport.exchange

    def counting(outgoing, incoming, tag):
        sent[0] += sum(array.nbytes for _, array in outgoing)
        return exchange(outgoing, incoming, tag)

    transport.exchange = counting
    return sent


def picture(losses: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(7, 4))
    for (name, values), style in zip(losses.items(), ("-", "--", "-.", ":"), strict=True):
        smooth = np.convolve(values, np.ones(10) / 10, "valid")
        axes.plot(range(10, len(values) + 1), smooth, style, label=name, linewidth=1.5)
    axes.set(xlabel="step", ylabel="loss, mean of 10 steps", yscale="log")
    axes.set_title("Digits on four ranks as two hosts", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(RESULTS.parent.parent / "docs" / "pictures" / "compression.png", dpi=120)


def main() -> None:
    torch.set_num_threads(1)
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
        picture(losses)
        print(machine())


if __name__ == "__main__":
    main()
