"""RingStrategy on two simulated devices: the model's weights, with Lightning's own DDP strategy beside it."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ring_plugins.lightning import RingStrategy
from tests.worker import report


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return (self.layers(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator))
trainer = L.Trainer(
    strategy=RingStrategy(), accelerator="gpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
model = Model()
trainer.fit(model, DataLoader(data, 8))
weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
report("sum", weights.double().sum().item())
report("finite", bool(weights.isfinite().all()))
report("steps", trainer.global_step)
report("device", str(trainer.strategy.root_device))
