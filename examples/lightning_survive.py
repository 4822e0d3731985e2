"""Train on scanned digits with Lightning while ranks are killed, rank 0 too: the others finish the step and go on.

    python examples/lightning_survive.py               # four processes; one of them is killed in epochs 3, 6 and 9
    python examples/lightning_survive.py --kill        # nobody is killed, to compare the accuracy
    python examples/lightning_survive.py --on-failure replace   # another process takes the place of each

The only argument for that is `RingStrategy(on_failure=...)`. `Killer` kills, and `as_many_samples` changes the learning
rate with the number of samples in a step, which is up to you.
"""

import argparse
import os
import signal
import time
import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MeanMetric

import ring_plugins as ring
from ring_plugins.lightning import RingStrategy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=int, default=4, help="number of processes")
parser.add_argument("--kill", type=int, nargs="*", default=[3, 6, 9], help="epochs in which a rank is killed")
parser.add_argument("--on-failure", choices=["continue", "replace"], default="continue", help="what the others do")
parser.add_argument("--pause", type=float, help="seconds a step takes longer, as in a larger network")
arguments = parser.parse_args()
if arguments.pause is None:  # a new process imports for seconds, in which this training would be over
    arguments.pause = 0.15 if arguments.on_failure == "replace" else 0.0

batch_size = 16  # per rank
learning_rate = 1e-3  # for one rank; multiplied by the number of ranks, because the batch grows with them
validation_digits = 360  # a fifth of the 1,797

# A deprecation warning of torch for Lightning 2.6, which a script cannot avoid.
warnings.filterwarnings("ignore", message=".*LeafSpec.*")


class Digits(L.LightningModule):
    """A convolution and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Dropout(0.3), nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
        self.accuracy = MeanMetric()  # over all ranks that are there

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: list[torch.Tensor], batch_index: int) -> None:
        images, labels = batch
        self.accuracy.update((self.network(images).argmax(1) == labels).float())
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=learning_rate * self.trainer.world_size)

    def on_train_start(self) -> None:
        ring.on_membership_change(self.as_many_samples)

    def as_many_samples(self, change: ring.MembershipChange) -> None:
        """Called on all ranks, before the step in which they lost one or after the step in which one joined."""
        for group in self.optimizers().param_groups:
            group["lr"] *= change.size / change.size_before


class Killer(L.Callback):
    """Kills rank 0 or 1 in the middle of some epochs, and says how each epoch went."""

    def on_train_batch_start(self, trainer: L.Trainer, model: Digits, batch: list[torch.Tensor], index: int) -> None:
        time.sleep(arguments.pause)
        epoch = trainer.current_epoch + 1
        is_victim = epoch in arguments.kill and trainer.world_size > 1 and trainer.global_rank == epoch % 2
        if index == 5 and is_victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_end(self, trainer: L.Trainer, model: Digits) -> None:
        if trainer.is_global_zero:
            accuracy = trainer.callback_metrics["accuracy"]
            print(f"epoch {trainer.current_epoch + 1:2}, ranks {trainer.world_size}, accuracy {accuracy:.3f}")


started = time.perf_counter()
L.seed_everything(1, verbose=False)
scans = load_digits()
images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16  # 8 x 8 pixels of 0 to 16
digits = TensorDataset(images, torch.tensor(scans.target))
training, validation = random_split(
    digits,
    [len(digits) - validation_digits, validation_digits],
    torch.Generator().manual_seed(1),  # the same split on every rank
)

trainer = L.Trainer(
    strategy=RingStrategy(on_failure=arguments.on_failure), accelerator="cpu", devices=arguments.devices, max_epochs=12,
    callbacks=[Killer()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, num_sanity_val_steps=0,
)  # fmt: skip
# Lightning gives every rank its own share of both loaders. With "continue", it makes new shares after a loss.
trainer.fit(
    Digits(), DataLoader(training, batch_size, shuffle=True, drop_last=True), DataLoader(validation, batch_size=60)
)
if trainer.is_global_zero:
    accuracy = trainer.callback_metrics["accuracy"]
    print(f"ranks {trainer.world_size}, {time.perf_counter() - started:.1f} s, validation accuracy {accuracy:.3f}")
