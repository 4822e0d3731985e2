"""Train on scanned digits while ranks are killed, rank 0 too: the others finish the step and go on.

    python examples/survive.py               # four processes; one of them is killed in epochs 3, 6 and 9
    python examples/survive.py --kill        # nobody is killed, to compare the accuracy

It differs from torch_loop.py in two arguments of `ring.init`, in shards of the data that are dealt anew in each epoch,
and in the lines that kill.
"""

import argparse
import os
import signal
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=4, help="number of processes")
parser.add_argument("--kill", type=int, nargs="*", default=[3, 6, 9], help="epochs in which a rank is killed")
arguments = parser.parse_args()

batch_size = 16  # per rank
learning_rate = 1e-3  # for one rank; multiplied by the number of ranks, because the batch grows with them
epochs = 12
validation_digits = 360  # a fifth of the 1,797
seed = 1

started = time.perf_counter()
ring.init(ranks=arguments.ranks, on_failure="continue", min_ranks=1)
torch.manual_seed(seed + ring.rank())  # every rank drops different neurons

scans = load_digits()
images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16  # 8 x 8 pixels of 0 to 16
digits = TensorDataset(images, torch.tensor(scans.target))
training, validation = random_split(
    digits,
    [len(digits) - validation_digits, validation_digits],
    torch.Generator().manual_seed(seed),  # the same split on every rank
)

model = nn.Sequential(
    nn.Conv2d(1, 32, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.3),
    nn.Linear(32 * 4 * 4, 128),
    nn.ReLU(),
    nn.Linear(128, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate * ring.size())
optimizer = DistributedOptimizer(optimizer, model.named_parameters())
broadcast_parameters(model)


@ring.on_membership_change
def fewer_samples(change):
    """Called on all that are left, before the step in which they lost a rank."""
    for group in optimizer.param_groups:
        group["lr"] *= change.size / change.size_before


def accuracy():
    """Every rank validates every size-th digit, and the counts are summed."""
    model.eval()
    images, labels = validation[list(range(ring.rank(), len(validation), ring.size()))]
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    model.train()
    return ring.all_reduce(right, ring.SUM).item() / len(validation)


for epoch in range(1, epochs + 1):
    # The number of ranks, and that of this one, may have changed since the last epoch.
    sampler = DistributedSampler(training, ring.size(), ring.rank(), seed=seed, drop_last=True)
    sampler.set_epoch(epoch)
    is_victim = epoch in arguments.kill and ring.size() > 1 and ring.rank() == epoch % 2  # in epoch 6 rank 0
    slowest = 0.0
    for step, (images, labels) in enumerate(DataLoader(training, batch_size, sampler=sampler, drop_last=True)):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        if is_victim and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        slowest = max(slowest, time.perf_counter() - began)
    right = accuracy()
    if ring.rank() == 0:
        print(f"epoch {epoch:2}, ranks {ring.size()}, accuracy {right:.3f}, longest step {slowest * 1e3:.0f} ms")

if ring.rank() == 0:
    print(f"ranks {ring.size()}, {time.perf_counter() - started:.1f} s, validation accuracy {right:.3f}")
ring.shutdown()
