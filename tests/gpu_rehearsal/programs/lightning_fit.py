"""RingStrategy and RingFabricStrategy on two simulated devices, also with a sharded optimizer."""

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ring_plugins.lightning import RingFabricStrategy, RingStrategy
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


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def fitted(shard: bool, precision: str) -> tuple[torch.Tensor, L.Trainer]:
    trainer = L.Trainer(
        strategy=RingStrategy(shard_optimizer=shard), accelerator="gpu", devices=2, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, precision=precision,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, DataLoader(data, 8))
    return flat(model), trainer


def fitted_by_fabric(shard: bool) -> torch.Tensor:
    fabric = Fabric(strategy=RingFabricStrategy(shard_optimizer=shard), accelerator="gpu", devices=2)
    fabric.launch()
    module = Model()
    model, optimizer = fabric.setup(module.layers, module.configure_optimizers())
    loader = fabric.setup_dataloaders(DataLoader(data, 8))
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            fabric.backward((model(inputs) - targets).square().mean())
            optimizer.step()
    return flat(module.layers)


weights, trainer = fitted(False, "32-true")
report("sum", weights.double().sum().item())
report("unlike a sharded one", float((fitted(True, "32-true")[0] - weights).abs().max()))
report("mixed", [bool(fitted(False, how)[0].isfinite().all()) for how in ("bf16-mixed", "16-mixed")])
report("Fabric", [fitted_by_fabric(shard).double().sum().item() for shard in (False, True)])
report("finite", bool(weights.isfinite().all()))
report("steps", trainer.global_step)
report("device", str(trainer.strategy.root_device))
