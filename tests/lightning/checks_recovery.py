"""A `Trainer.fit` of which ranks die as TEST_DEATHS says: {rank: [step, point]}. Reports what the survivors have."""

import json
import os
import sys
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.lightning import RingStrategy
from tests.keras.test_recovery import gradient
from tests.lightning.test_recovery import EPOCHS, SAMPLES, STEPS
from tests.mortal import die, end_at
from tests.passes import members_of_passes
from tests.worker import report

warnings.simplefilter("ignore")
UNITS = 300_000  # so that one gradient is large and the other small


class Numbers(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Model(L.LightningModule):
    """Its gradients are those of `gradient`, by the rank with which this process started."""

    def __init__(self, rank: int, death: Any) -> None:
        super().__init__()
        self.rank, (self.step_of_death, self.point) = rank, death
        self.large, self.small = torch.nn.Parameter(torch.zeros(UNITS)), torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1))
        self.mean = MeanMetric()
        self.history: list[Any] = []
        self.passes = members_of_passes()
        self.indices: dict[int, list[int]] = {}
        self.validated: list[Any] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.indices.setdefault(self.current_epoch, []).extend(batch.tolist())
        if self.global_step == self.step_of_death and (
            self.point in ("in step", "SIGTERM") or self.point.startswith("barrier")
        ):
            end_at(self.point)
        # As many steps of the replay as there were optimizer steps, whatever shard of the data is left.
        return gradient(self.global_step % STEPS, self.rank) * (self.large.sum() + self.small.sum())

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append(self.passes[-1])

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        if self.point == "in validation" and self.current_epoch == self.step_of_death:
            die()
        self.mean.update(float(self.rank + 1))
        self.log("mean", self.mean, on_epoch=True)
        self.log("synced", float(self.rank + 1), sync_dist=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        alone = self.mean.compute().item()
        self.validated.append([current().world_ranks, alone])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5, momentum=0.5)


class Dies(L.Callback):
    def on_save_checkpoint(self, trainer: Any, model: Any, checkpoint: Any) -> None:
        if model.point == "in checkpoint" and trainer.current_epoch == model.step_of_death:
            die()


def main() -> None:
    ranks = int(os.environ["TEST_RANKS"])
    strategy = RingStrategy(on_failure="continue", min_ranks=int(os.environ.get("TEST_MIN", "1")))
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=ranks, max_epochs=EPOCHS, enable_progress_bar=False,
        logger=False, default_root_dir=os.environ["TEST_ROOT"], enable_model_summary=False, num_sanity_val_steps=0,
        sync_batchnorm="--sync-batchnorm" in sys.argv,
        callbacks=[Dies(), ModelCheckpoint(save_last=True)],
    )  # fmt: skip
    me = trainer.global_rank
    model = Model(me, json.loads(os.environ["TEST_DEATHS"]).get(str(me), (None, "")))
    loader = DataLoader(Numbers(), batch_size=1)
    trainer.fit(model, loader, DataLoader(Numbers(), batch_size=4))
    seen = ring.all_gather_object(model.indices)
    found = {
        "weights": [sorted(set(weight.tolist())) for weight in (model.large.detach(), model.small.detach())],
        "history": model.history,
        "validated": model.validated,
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "seen": [[sorted(indices.get(epoch, [])) for indices in seen] for epoch in range(EPOCHS)],
        "left": ring.all_gather_object(me),
        "new ranks": ring.all_gather_object([trainer.global_rank, trainer.world_size]),
        "writes": ring.all_gather_object(L.pytorch.utilities.rank_zero_only.rank),
    }
    report("found", found, me)
    if trainer.is_global_zero:
        saved = torch.load(trainer.checkpoint_callback.last_model_path, weights_only=False)
        assert saved["state_dict"]["small"].tolist() == model.small.tolist()
        assert saved["global_step"] == trainer.global_step


if __name__ == "__main__":
    main()
