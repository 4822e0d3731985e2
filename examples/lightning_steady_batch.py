"""Train with Lightning by steps of the same samples on any number of ranks, while two are killed.

    python examples/lightning_steady_batch.py                     # four processes; one is killed in epochs 2 and 3
    python examples/lightning_steady_batch.py --kill              # nobody is killed
    python examples/lightning_steady_batch.py --devices 2 --kill  # two processes from the start

All three print the same checksum of the weights, as steady_batch.py does for a loop of PyTorch.
"""

import argparse
import os
import signal
import warnings
import zlib

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ring_plugins.lightning import RingStrategy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=int, default=4, help="number of processes")
parser.add_argument("--kill", type=int, nargs="*", default=[2, 3], help="epochs in which a rank is killed")
arguments = parser.parse_args()

batch_size = 16  # of a pass
global_batch_size = 64  # of a step, on all ranks together: four passes, whoever makes them
epochs = 4

warnings.simplefilter("ignore")
torch.set_num_threads(1)  # other numbers of threads may round differently
L.seed_everything(1, verbose=False)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))

    def on_train_epoch_start(self):
        epoch = self.current_epoch + 1
        is_alone = self.trainer.world_size == 1
        self.is_victim = epoch in arguments.kill and not is_alone and self.global_rank == (epoch + 1) % 2

    def training_step(self, batch, index):
        if self.is_victim and index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        images, digits = batch
        loss = F.cross_entropy(self.layers(images), digits)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch + 1}, ranks {self.trainer.world_size}, step {self.global_step}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


scans = load_digits()
images = torch.tensor(scans.images, dtype=torch.float32).flatten(1) / 16  # 8 x 8 pixels of 0 to 16
data = TensorDataset(images, torch.tensor(scans.target))
model = Classifier()
strategy = RingStrategy(global_batch_size=global_batch_size, exact=True, on_failure="continue")
trainer = L.Trainer(
    strategy=strategy, accelerator="cpu", devices=arguments.devices, max_epochs=epochs, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, DataLoader(data, batch_size, shuffle=True))

if trainer.is_global_zero:
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    right = (model.layers.eval()(images).argmax(1) == data.tensors[1]).float().mean().item()
    print(f"ranks {trainer.world_size}, accuracy {right:.3f}, weights {zlib.crc32(weights):08x}")
