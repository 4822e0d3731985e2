"""Lightning's Trainer with RingStrategy ends with the weights of plain torch on the mean of the ranks' gradients."""

from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from ring_plugins.lightning import RingStrategy
from tests.gpu.card import CUDA, DEVICE, RANK, RANKS, fact, flat, ring, torch

nn = torch.nn
BATCHES = 4


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, 100), nn.Tanh(), nn.LayerNorm(100), nn.Linear(100, 1))

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return self.body(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader([batch(step, RANK) for step in range(BATCHES)], batch_size=None)


def fitted(precision: str) -> Model:
    model = Model()
    trainer = Trainer(
        accelerator="gpu" if CUDA else "cpu",
        devices=1 if torch.cuda.device_count() == 1 else RANKS,
        use_distributed_sampler=False,
        strategy=RingStrategy(),
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model)
    return model


def by_hand(precision: str) -> nn.Module:
    """One process with the batches of all ranks."""
    model = Model().to(DEVICE)
    optimizer = model.configure_optimizers()
    for step in range(BATCHES):
        optimizer.zero_grad()
        for rank in range(RANKS):
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = model.training_step(batch(step, rank).to(DEVICE), step)
            (loss / RANKS).backward()
        optimizer.step()
    return model


for precision in ("32-true", "bf16-mixed"):
    ours = flat(fitted(precision))
    rows = ring.all_gather(ours[None])
    worst = float((ours - flat(by_hand(precision))).abs().max())
    fact(
        check="Lightning",
        precision=precision,
        same_on_all_ranks=all(torch.equal(rows[0], row) for row in rows),
        worst=worst,
        close=worst < 1e-5,
    )
