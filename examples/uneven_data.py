"""Train on scanned digits of which each rank has another number, as where each reads files of its own.

    python examples/uneven_data.py                               # starts the second process itself
    python examples/uneven_data.py --ranks 3                     # with three
    mpirun -n 2 python examples/uneven_data.py                   # mpirun starts the processes

Every sample counts once, and none is left out: ranks that have run out wait in `join` for the others.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters, join

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=2, help="number of processes, unless a launcher has started them")
arguments = parser.parse_args()

batch_size = 32  # per rank
ring.init(ranks=arguments.ranks)
torch.manual_seed(1)

scans = load_digits()
images = torch.tensor(scans.images, dtype=torch.float32).flatten(1) / 16  # 8 x 8 pixels of 0 to 16
digits = TensorDataset(images, torch.tensor(scans.target))
shares = torch.arange(1, ring.size() + 1) / sum(range(1, ring.size() + 1))  # of two ranks, a third and two thirds
ends = [0, *(shares.cumsum(0) * len(digits)).round().int().tolist()]
own = torch.utils.data.Subset(digits, range(ends[ring.rank()], ends[ring.rank() + 1]))
loader = DataLoader(own, batch_size, shuffle=True)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
broadcast_parameters(model)
adam = torch.optim.Adam(model.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 20)
optimizer = DistributedOptimizer(adam, model.named_parameters())

for _ in range(20):
    with join(optimizer, batch_size=batch_size) as data:
        for x, y in loader:
            optimizer.zero_grad()
            data.weighted(F.cross_entropy(model(x), y), len(x)).backward()  # samples weigh alike, in small batches too
            optimizer.step()
    schedule.step()

# Averages of ranks are not those of samples here: sum up, and divide by what all ranks have.
x, y = own[:]
right = ring.all_reduce((model(x).argmax(1) == y).sum(), ring.SUM).item()
batches = ring.all_gather_object(len(loader))
if ring.rank() == 0:
    print(f"ranks {ring.size()}, batches of each {batches}, accuracy {right / len(digits):.3f}")
ring.shutdown()
