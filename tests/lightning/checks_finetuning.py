"""`BackboneFinetuning` unfreezes layers in epoch 1; ranks 1 and 0 die later. Reports what all have in the end."""

import hashlib
import os
import signal
import tempfile
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.lightning import RingStrategy
from tests.joiners import wait_for_joiners
from tests.worker import report

warnings.simplefilter("ignore")


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 2)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        world = current()
        if (self.current_epoch, index, world.world_rank) in ((1, 2, 1), (3, 1, 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_joiners({0, 1, 2} - {world.members.known[rank].slot for rank in world.world_ranks}, 60)
        loss: torch.Tensor = self.head(self.backbone(batch[0])).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.01, momentum=0.5)


def main() -> None:
    L.seed_everything(7, verbose=False)
    model = Model()
    trainer = L.Trainer(
        strategy=RingStrategy(on_failure="replace"), accelerator="cpu", devices=int(os.environ["TEST_RANKS"]),
        max_epochs=4, enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False,
        default_root_dir=tempfile.gettempdir(),
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False)],
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(36, 4)), batch_size=3))
    (optimizer,) = trainer.optimizers
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    momenta = b"".join(
        optimizer.state[p]["momentum_buffer"].numpy().tobytes()
        for group in optimizer.param_groups
        for p in group["params"]
        if "momentum_buffer" in optimizer.state[p]
    )
    found = {
        "weights": hashlib.sha256(weights).hexdigest(),
        "momentum": hashlib.sha256(momenta).hexdigest(),
        "momenta": len(optimizer.state),
        "flags": [p.requires_grad for p in model.parameters()],
        "tracks": model.backbone[1].track_running_stats,
        "groups": len(optimizer.param_groups),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "numbers": ring.all_gather_object(current().world_rank),
    }
    report("found", found, current().shard[0])


if __name__ == "__main__":
    main()
