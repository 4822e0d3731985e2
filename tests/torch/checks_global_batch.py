"""A training with a global batch, by ranks of which some are lost or join, and the same by one process without us.

Each rank compares its weights with those of the latter. TEST_ENDS says who ends, in which step and how: [[slot, step,
point], ...], see tests/mortal.py. TEST_ADDED says in which step rank 0 asks for another rank.
"""

import copy
import json
import os
import zlib
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.launcher.growth import request_ranks
from ring_plugins.torch import DistributedOptimizer, GlobalBatches, TrainingState, broadcast_parameters
from ring_plugins.torch.step_plan import job_order
from tests.joiners import wait_for_joiners
from tests.mortal import end_at
from tests.worker import report

EPOCHS, SAMPLES, BATCH, GLOBAL = 3, 70, 4, 16


class Model(nn.Module):
    """With dropout, a layer that only some batches use, and one with statistics of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.seldom = nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.last, self.dropout = nn.Linear(16, 1), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(torch.tanh(self.norm(self.first(x))))
        return self.last(x + self.seldom(x) if x.sum() > 0 else x)


def dataset() -> TensorDataset:
    x, y = torch.randn(2, SAMPLES, 4, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, y[:, :1])


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def alone(model: nn.Module, loader: DataLoader[Any], epochs: int = EPOCHS) -> nn.Module:
    """The model after a plain loop that adds the gradients of a step's batches up, in their order."""
    data, optimizer = loader.dataset, torch.optim.AdamW(model.parameters(), 0.05)
    for epoch in range(epochs):
        order = job_order(loader.sampler, 0, epoch)
        for first in range(0, SAMPLES, GLOBAL):
            end = min(first + GLOBAL, SAMPLES)
            sums: dict[nn.Parameter, torch.Tensor] = {}
            for number in range(first, end, BATCH):
                optimizer.zero_grad()
                torch.manual_seed(zlib.crc32(repr((0, epoch, "batch", number)).encode()))
                batch = data[order[number : min(number + BATCH, end)]]
                loss_of(model, *batch).backward()
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        own = parameter.grad * (len(batch[0]) / BATCH)
                        sums[parameter] = sums[parameter] + own if parameter in sums else own
            for parameter, total in sums.items():
                parameter.grad = total / ((end - first) / BATCH)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model


def train(loader: DataLoader[Any], model: nn.Module, exact: bool, ends: list[Any]) -> list[Any]:
    """Train with a global batch; returns by how many ranks each step was computed, and how often it was begun."""
    inner = torch.optim.AdamW(model.parameters(), 0.05)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), bucket_bytes=400)
    steps = GlobalBatches(loader, optimizer, global_batch_size=GLOBAL, exact=exact)
    slot, number = ring.rank(), current().world_rank
    state = TrainingState(model=model, optimizer=optimizer, steps=steps, epoch=0, history=[])
    for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020 - the range is made once
        for step in steps:
            at = len(state.history)
            for i, (x, y) in enumerate(step):
                for of, when, point in ends:
                    if (of, when) == (number, at) and not i and step.times == 1:
                        end_at(point)
                loss_of(model, x, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            state.history.append([ring.size(), step.times])
            if number == 0 and at == int(os.environ.get("TEST_ADDED", "-1")):
                request_ranks(1, os.getppid())
            # Whoever is missing, or was asked for, joins behind the next step.
            wanted = (
                int(os.environ.get("TEST_WANTED", "0")) if at in json.loads(os.environ.get("TEST_WAITS", "[]")) else 0
            )
            missing = set(range(wanted)) - {current().members.known[rank].slot for rank in current().world_ranks}
            if missing:
                wait_for_joiners(missing, 120)
            state.commit()
    report("history", state.history, slot)
    optimizer.close()
    return state.history


def main() -> None:
    ranks, ends = int(os.environ["TEST_RANKS"]), json.loads(os.environ.get("TEST_ENDS", "[]"))
    failure, most = os.environ.get("TEST_FAILURE"), os.environ.get("TEST_MOST")
    ring.init(ranks=ranks, on_failure=failure, max_ranks=int(most) if most else None)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    slot = ring.rank()
    model = Model()
    broadcast_parameters(model)
    loader = DataLoader(dataset(), BATCH, shuffle=True, num_workers=int(os.environ.get("TEST_WORKERS", "0")))
    expected = alone(copy.deepcopy(model), loader)
    for exact in json.loads(os.environ.get("TEST_EXACT", "[true]")):
        own = copy.deepcopy(model)
        train(loader, own, exact, ends)
        pairs = list(zip(own.parameters(), expected.parameters(), strict=True))
        errors = [(one - other).abs().max().item() for one, other in pairs]
        report(f"error {exact}", max(errors), slot)
        report(f"equal {exact}", all(torch.equal(one, other) for one, other in pairs), slot)


if __name__ == "__main__":
    main()
