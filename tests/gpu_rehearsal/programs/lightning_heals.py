"""A rank of a Trainer on GPUs is killed in a step, and the others finish the fit: `lightning_heals.py POINT`."""

import os
import signal
import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ring_plugins as ring
from ring_plugins.lightning import RingStrategy
from tests.worker import report

RANKS, POINT = int(os.environ["TEST_RANKS"]), sys.argv[1]


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

    def die_at(self, point: str) -> None:
        if point == POINT and self.global_step == 3 and ring.rank() == 1 and ring.size() == RANKS:
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.die_at("forward")
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("validation", (self.layers(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def on_after_backward(self) -> None:
        self.die_at("update")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, 8, generator=generator), torch.randn(96, 1, generator=generator))
trainer = L.Trainer(
    strategy=RingStrategy(on_failure="continue"), accelerator="gpu", devices=RANKS, max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
model = Model()
trainer.fit(model, DataLoader(data, 8), DataLoader(data, 8))
weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
everywhere = ring.all_gather_object(weights)
report("size", ring.size())
report("unlike rank 0", int((weights != everywhere[0]).sum()))
report("finite", bool(weights.isfinite().all()))
report("metrics", sorted(name for name, value in trainer.callback_metrics.items() if value.isfinite()))
report("device", str(trainer.strategy.root_device))
