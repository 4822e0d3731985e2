"""Train a small network on scanned digits with Lightning Fabric, on several processes, with accumulation.

    python examples/fabric_digits.py                             # starts the second process itself
    mpirun -n 2 python examples/fabric_digits.py                 # mpirun starts the processes
    torchrun --nproc-per-node 2 examples/fabric_digits.py        # torchrun starts them

The only line for several processes is `strategy=RingFabricStrategy()`.
"""

import argparse
import time

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from ring_plugins.lightning import RingFabricStrategy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=int, default=2, help="processes, unless a launcher has started them already")
parser.add_argument("--epochs", type=int, default=20)
arguments = parser.parse_args()

batch_size, accumulate = 16, 2  # per rank: two batches of 16 for each update
started = time.perf_counter()
fabric = Fabric(strategy=RingFabricStrategy(), accelerator="cpu", devices=arguments.devices)
fabric.launch()
fabric.seed_everything(1, verbose=False)

scans = load_digits()
images = torch.tensor(scans.images, dtype=torch.float32).flatten(1) / 16  # 64 pixels of 0 to 16
digits = TensorDataset(images, torch.tensor(scans.target))
training, validation = random_split(digits, [1437, 360], torch.Generator().manual_seed(1))  # the same on all ranks
loader = fabric.setup_dataloaders(DataLoader(training, batch_size, shuffle=True, drop_last=True))

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * fabric.world_size)
model, optimizer = fabric.setup(model, optimizer)  # broadcasts rank 0's weights

for _ in range(arguments.epochs):
    for index, (x, y) in enumerate(loader, start=1):
        communicates = index % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not communicates):
            fabric.backward(F.cross_entropy(model(x), y) / accumulate)
        if communicates:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)  # of the averages
            optimizer.step()
            optimizer.zero_grad()

model.eval()
x, y = validation[list(range(fabric.global_rank, len(validation), fabric.world_size))]  # each rank its share
with torch.no_grad():
    right = (model(x).argmax(1) == y).sum().float()
accuracy = fabric.all_reduce(right, reduce_op="sum").item() / len(validation)
fabric.print(f"ranks {fabric.world_size}, {time.perf_counter() - started:.1f} s, validation accuracy {accuracy:.3f}")
