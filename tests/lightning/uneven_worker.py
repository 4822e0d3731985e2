"""Ranks with different numbers of batches train together, and once more one process on the concatenated batches."""

import os

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import SumMetric

import ring_plugins as ring
from ring_plugins.lightning import RingStrategy
from tests.worker import report

RANKS = int(os.environ["TEST_RANKS"])
CASES = os.environ["TEST_CASE"].split("+")
ring.init(ranks=RANKS, on_failure="continue" if "continue" in CASES else "end")
BATCH, EPOCHS = 4, 2
#: Batches of each rank, the last of which may be smaller.
COUNTS = ((3, 0, 2) if "zero" in CASES else (7, 4, 2) if "accumulate" in CASES else (5, 3, 4))[:RANKS]
torch.manual_seed(0)
X, Y = torch.randn(2, 40 * RANKS, 3, dtype=torch.float64)


def own(rank):
    """The indices of the samples of a rank, the last batch of which has one less."""
    return range(40 * rank, 40 * rank + max(0, BATCH * COUNTS[rank] - 1))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[i], Y[i]) for i in own(ring.rank())])


def loader():
    data = Stream() if "stream" in CASES else [(X[i], Y[i]) for i in own(ring.rank())]
    return DataLoader(data, BATCH)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        norm = [torch.nn.BatchNorm1d(5)] if "norm" in CASES else []
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 5), *norm, torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
        self.seen = SumMetric()
        self.automatic_optimization = "manual" not in CASES
        self.logged = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.layers(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("most", float(len(x)), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.seen.update(len(x))
        if "manual" in CASES:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, *_):
        self.logged.append(float(self.trainer.callback_metrics["loss_step"]))

    def on_train_epoch_end(self):
        self.log("seen", self.seen.compute())
        self.seen.reset()

    def validation_step(self, batch, batch_idx):
        self.log("validated", F.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def alone():
    """Weights, and the losses of all batches, of one process."""
    module = Model()
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    every, losses = 3 if "accumulate" in CASES else 1, []
    for _ in range(EPOCHS):
        by_rank = [[list(own(rank))[i : i + BATCH] for i in range(0, len(own(rank)), BATCH)] for rank in range(RANKS)]
        longest = max(map(len, by_rank))
        for number in range(longest):
            indices = [i for batches in by_rank if number < len(batches) for i in batches[number]]
            loss = F.mse_loss(module.layers(X[indices]), Y[indices])
            (loss / every).backward()
            losses.append(loss.item())
            if number % every == every - 1 or number == longest - 1:
                if "clip" in CASES:
                    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                if "manual" not in CASES:  # there Lightning leaves it to the script
                    scheduler.step()
    return module, losses


def flat(module):
    return torch.cat(
        [one.detach().reshape(-1).double() for one in (*module.layers.parameters(), *module.layers.buffers())]
    )


trainer = Trainer(
    strategy=RingStrategy(
        shard_optimizer="tensors" if "tensors" in CASES else "shard" in CASES,
        on_failure="continue" if "continue" in CASES else None,
    ),
    devices=RANKS,
    accelerator="cpu",
    max_epochs=EPOCHS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
    sync_batchnorm="norm" in CASES,
    accumulate_grad_batches=3 if "accumulate" in CASES else 1,
    gradient_clip_val=0.1 if "clip" in CASES else None,
    num_sanity_val_steps=0,
    val_check_interval=1.0 if "stream" in CASES else 0.5,
    log_every_n_steps=1,
)
model = Model()
validation = DataLoader([(X[i], Y[i]) for i in range(8)], BATCH)
trainer.fit(model, loader(), validation)
other, losses = alone()
metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
weights = flat(model)
report("error", (weights - flat(other)).abs().max().item())
report("equal", all(torch.equal(weights, one) for one in ring.all_gather_object(weights)))
report("losses", max(abs(a - b) for a, b in zip(model.logged, losses, strict=True)))
report("seen", metrics["seen"])
report("most", metrics["most"])
report("samples", sum(len(own(rank)) for rank in range(RANKS)))
report("steps", [trainer.global_step, len(losses)])
report("mean", metrics["loss_epoch"])
