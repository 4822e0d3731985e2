"""A `Trainer.fit` in which other processes take the places of ranks that are killed. Reports what all have in the end.

TEST_DEATHS and TEST_PENDING: see tests/torch/checks_replacement.py. Points "in validation" and "in checkpoint" are of
an epoch instead of a step.
"""

import json
import os
import signal
import sys
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import MeanMetric

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.lightning import RingStrategy
from tests.lightning.test_replacement import BATCHES, EPOCHS, SEED
from tests.mortal import die
from tests.passes import members_of_passes
from tests.torch.checks_replacement import begin_step, gradient, own_deaths, prepare_joiner, slots_taken
from tests.worker import report

warnings.simplefilter("ignore")


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Model(L.LightningModule):
    """Its gradients are those of `gradient`, by the slot of this process."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.slot, self.mine = 0, list[tuple[int, str]]()
        self.large, self.small = torch.nn.Parameter(torch.zeros(300_000)), torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("left_out", torch.zeros(1), persistent=False)
        self.mean = MeanMetric()
        self.history: list[Any] = []
        self.passes = members_of_passes()
        self.seen: dict[str, list[int]] = {}
        self.validated: list[Any] = []
        self.hooks: list[str] = []

    def setup(self, stage: str) -> None:
        self.slot = current().shard[0]
        self.mine = own_deaths(self.slot, self.ranks)
        prepare_joiner(self.mine)
        if current().is_joining:
            with torch.no_grad():
                self.small.add_(1)  # which the others' state overwrites

    def on_train_start(self) -> None:
        self.hooks.append("train start")

    def on_train_epoch_start(self) -> None:
        self.hooks.append(f"epoch {self.current_epoch}")

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        batch, *second = batch if isinstance(batch, list) else [batch]
        step = self.trainer.fit_loop.total_batch_idx
        assert index == step % BATCHES
        self.seen.setdefault(str(self.current_epoch), []).extend(batch.tolist())
        begin_step(step, self.mine, self.ranks)
        sampler = DistributedSampler(range(2 * self.ranks), self.ranks, self.slot, seed=SEED)
        sampler.set_epoch(self.current_epoch)
        assert all(int(one) == list(sampler)[index % 2] for one in second)
        self.kept += 1
        self.left_out += 1
        self.log("loss", float(self.slot + 1), on_step=True, on_epoch=True, sync_dist=True)
        return gradient(step, self.slot) * (self.large.sum() + self.small.sum())

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append(slots_taken(self.passes.pop()) if self.passes else [])  # there is none if it accumulates

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        if (self.current_epoch, "in validation") in self.mine:
            die()
        self.mean.update(float(self.slot + 1))
        self.log("mean", self.mean, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        mean = self.mean.compute().item()
        self.validated.append([slots_taken(), mean])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.5, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert len({str(one) for one in ring.all_gather_object(self.history)}) == 1
        if self.trainer.training is False and (self.current_epoch, "in checkpoint") in self.mine:
            die()
        checkpoint["history"], checkpoint["validated"] = self.history, self.validated

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if (0, "load raises") in self.mine:
            raise KeyError("a module that cannot load")
        self.history, self.validated = list(checkpoint["history"]), list(checkpoint["validated"])


def main() -> None:
    ranks, root = int(os.environ["TEST_RANKS"]), os.environ["TEST_ROOT"]
    strategy = RingStrategy(on_failure="replace", min_ranks=int(os.environ.get("TEST_MIN", "1")))
    checkpoints = ModelCheckpoint(monitor="mean", save_last=True, save_top_k=EPOCHS)
    options = json.loads(os.environ.get("TEST_TRAINER", "{}"))
    L.seed_everything(SEED, verbose=False)
    trainer = L.Trainer(
        strategy=strategy, accelerator=os.environ.get("TEST_ACCELERATOR", "cpu"), devices=ranks, max_epochs=EPOCHS,
        enable_progress_bar="--progress" in sys.argv, log_every_n_steps=1, default_root_dir=root,
        enable_model_summary=False, **options,
        logger=CSVLogger(root, "csv"),
        callbacks=[checkpoints, EarlyStopping("mean", patience=100)],
    )  # fmt: skip
    model = Model(ranks)
    workers = int(os.environ.get("TEST_WORKERS", "0"))
    loader: Any = DataLoader(Numbers(BATCHES * ranks), batch_size=1, shuffle=True, num_workers=workers)
    if "--two-loaders" in sys.argv:
        loader = CombinedLoader([loader, DataLoader(Numbers(2 * ranks), batch_size=1)], "max_size_cycle")
    trainer.fit(model, loader, DataLoader(Numbers(2 * ranks), batch_size=1))
    (optimizer,), (schedule,) = trainer.optimizers, trainer.lr_scheduler_configs
    found = {
        "weights": [sorted(set(weight.tolist())) for weight in (model.large.detach(), model.small.detach())],
        "buffers": [model.kept.item(), model.left_out.item()],
        "history": model.history,
        "validated": model.validated,
        "rates": [optimizer.param_groups[0]["lr"], *schedule.scheduler.get_last_lr()],
        "progress": [trainer.current_epoch, trainer.global_step, trainer.fit_loop.total_batch_idx],
        "stopping": [trainer.early_stopping_callback.wait_count, trainer.early_stopping_callback.best_score.item()],
        "checkpoints": [checkpoints.best_model_path, checkpoints.last_model_path, sorted(checkpoints.best_k_models)],
        "random": torch.rand(1).item(),
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "ranks": ring.all_gather_object([trainer.global_rank, trainer.world_size, model.slot]),
        "writes": ring.all_gather_object(L.pytorch.utilities.rank_zero_only.rank),
        "devices": trainer.num_devices,
        "on SIGTERM": getattr(signal.getsignal(signal.SIGTERM), "__qualname__", None),
    }
    report("found", found, model.slot)
    own = {"seen": model.seen, "hooks": model.hooks, "number": current().world_rank}
    report("own", {**own, "device": str(strategy.root_device)}, model.slot)
    if trainer.is_global_zero and not options:
        saved = torch.load(checkpoints.last_model_path, weights_only=False)
        assert saved["state_dict"]["small"].tolist() == model.small.tolist()
        assert saved["global_step"] == trainer.global_step


if __name__ == "__main__":
    main()
