"""A `Trainer.fit` with a global batch, by ranks of which some are lost or join, and the same by a plain loop.

Each rank compares its weights with those of the latter. TEST_ENDS and the like: see tests/torch/checks_global_batch.py.
"""

import copy
import json
import os
import zlib
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.lightning import RingStrategy
from ring_plugins.torch.step_plan import job_order
from tests.joiners import wait_for_joiners
from tests.mortal import end_at
from tests.torch import checks_global_batch
from tests.torch.checks_global_batch import BATCH, EPOCHS, GLOBAL, SAMPLES, dataset, loss_of
from tests.worker import report


class Model(L.LightningModule):
    def __init__(self, ends: list[Any]) -> None:
        super().__init__()
        self.net, self.mean = checks_global_batch.Model(), MeanMetric()
        self.ends, self.number, self.hooks = ends, 0, list[Any]()
        self.step_losses: list[float] = []
        self.history: list[Any] = []
        self.counted: list[float] = []

    def on_fit_start(self) -> None:
        self.number = current().world_rank

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        step = self.trainer.fit_loop._combined_loader.flattened[0].step
        for of, when, point, *passes in self.ends:
            is_now = (of, when, *(passes or [0])) == (self.number, self.global_step, step.index)
            if is_now and step.times == 1:
                end_at(point)
        loss = loss_of(self.net, *batch)
        self.mean.update(loss.detach(), weight=len(batch[0]))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("own", loss.detach(), on_step=True, on_epoch=False)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.hooks.append(index)
        self.step_losses.append(self.trainer.callback_metrics["loss_step"].item())
        step = self.trainer.fit_loop._combined_loader.flattened[0].step
        self.history.append([ring.size(), step.times])
        # Whoever is missing joins behind the next step.
        wanted, at = int(os.environ.get("TEST_WANTED", "0")), len(self.history) - 1
        wanted = wanted if at in json.loads(os.environ.get("TEST_WAITS", "[]")) else 0
        missing = set(range(wanted)) - {current().members.known[rank].slot for rank in current().world_ranks}
        if missing:
            wait_for_joiners(missing, 120)

    def on_train_epoch_end(self) -> None:
        self.counted.append(sum(ring.all_gather_object(self.mean.weight.item())))
        self.epoch_losses = [self.trainer.callback_metrics["loss_epoch"].item(), self.mean.compute().item()]
        self.mean.reset()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["history"] = [self.history, self.step_losses, self.hooks]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history, self.step_losses, self.hooks = copy.deepcopy(checkpoint["history"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def alone(model: nn.Module, loader: DataLoader[Any]) -> list[float]:
    """Train a model in a plain loop that adds up the gradients of a step's batches; returns the steps' losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 0.05), []
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for epoch in range(EPOCHS):
        order = job_order(loader.sampler, 0, epoch)
        for first in range(0, SAMPLES, GLOBAL):
            end = min(first + GLOBAL, SAMPLES)
            sums: dict[nn.Parameter, torch.Tensor] = {}
            total = 0.0
            for number in range(first, end, BATCH):
                optimizer.zero_grad()
                torch.manual_seed(zlib.crc32(repr((0, epoch, "pass", number)).encode()))
                batch = loader.dataset[order[number : min(number + BATCH, end)]]
                loss = loss_of(model, *batch)
                loss.backward()
                total += loss.item() * len(batch[0]) / (end - first)
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        own = parameter.grad * (len(batch[0]) / BATCH)
                        sums[parameter] = sums[parameter] + own if parameter in sums else own
            for parameter, sum_of in sums.items():
                parameter.grad = sum_of / ((end - first) / BATCH)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(total)
    return losses


def main() -> None:
    ranks, ends = int(os.environ["TEST_RANKS"]), json.loads(os.environ.get("TEST_ENDS", "[]"))
    workers = int(os.environ.get("TEST_WORKERS", "0"))
    torch.set_num_threads(1)
    for exact in json.loads(os.environ.get("TEST_EXACT", "[true]")):
        strategy = RingStrategy(
            global_batch_size=GLOBAL, exact=exact, on_failure=os.environ.get("TEST_FAILURE"), bucket_bytes=400
        )
        trainer = L.Trainer(
            strategy=strategy, accelerator="cpu", devices=ranks, max_epochs=EPOCHS, enable_progress_bar=False,
            logger=False, enable_model_summary=False, enable_checkpointing=False, gradient_clip_val=1.0,
        )  # fmt: skip
        torch.manual_seed(1)
        model = Model(ends)
        expected = copy.deepcopy(model.net)
        loader = DataLoader(dataset(), BATCH, shuffle=True, num_workers=workers)
        losses = alone(expected, loader)
        trainer.fit(model, loader)
        number = model.number
        pairs = list(zip(model.net.parameters(), expected.parameters(), strict=True))
        errors = [(one - other).abs().max().item() for one, other in pairs]
        report(f"error {exact}", max(errors), number)
        report(f"equal {exact}", all(torch.equal(one, other) for one, other in pairs), number)
        step_errors = [abs(one - other) for one, other in zip(model.step_losses, losses, strict=True)]
        report(f"loss {exact}", max(step_errors), number)
        sizes = [min(GLOBAL, SAMPLES - GLOBAL * step) for step in range(5)]
        epoch = sum(one * size for one, size in zip(losses[-5:], sizes, strict=True)) / SAMPLES
        report(f"epoch {exact}", [abs(one - epoch) for one in model.epoch_losses], number)
        report(f"steps {exact}", [trainer.global_step, trainer.num_training_batches, trainer.current_epoch], number)
        report("history", [model.history, model.hooks], number)
        report("counted", model.counted, number)
        report("rate", trainer.optimizers[0].param_groups[0]["lr"], number)


if __name__ == "__main__":
    main()
