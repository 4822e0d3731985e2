"""Ranks of a Trainer on GPUs are killed in a step, and the others finish the fit, and then another Trainer's.

`lightning_heals.py RANK:POINT:STEP ...`; deaths.py has the points.
"""

import os
import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ring_plugins as ring
from ring_plugins.lightning import RingStrategy
from tests.gpu_rehearsal.programs.deaths import Deaths
from tests.worker import report

RANKS = int(os.environ["TEST_RANKS"])


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

    def on_fit_start(self) -> None:
        self.deaths = Deaths(sys.argv[1:] if ring.size() == RANKS else [], ring.rank())
        self.deaths.follow(self.layers[1], self.layers[2].weight)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.deaths.begin(self.global_step)
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("validation", (self.layers(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def on_after_backward(self) -> None:
        self.deaths.at("update")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, 8, generator=generator), torch.randn(96, 1, generator=generator))


def fitted(devices: int) -> tuple[L.Trainer, torch.Tensor]:
    trainer = L.Trainer(
        strategy=RingStrategy(on_failure="continue"), accelerator="gpu", devices=devices, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, DataLoader(data, 8), DataLoader(data, 8))
    return trainer, torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def unlike_rank_0(weights: torch.Tensor) -> int:
    return int((weights != ring.all_gather_object(weights)[0]).sum())


first, weights = fitted(RANKS)
report("size", ring.size())
report("unlike rank 0", unlike_rank_0(weights))
report("finite", bool(weights.isfinite().all()))
report("metrics", sorted(name for name, value in first.callback_metrics.items() if value.isfinite()))
report("device", str(first.strategy.root_device))
second, weights = fitted(ring.size())
report("then", [str(second.strategy.root_device), second.global_step, bool(weights.isfinite().all())])
report("then unlike rank 0", unlike_rank_0(weights))
