"""Train a small convolutional network on scanned digits in a plain PyTorch loop, on several processes.

    python examples/torch_loop.py                                    # starts the second process itself
    python examples/torch_loop.py --ranks 1                          # one process, nothing to communicate
    mpirun -n 2 python examples/torch_loop.py                        # mpirun starts the processes
    torchrun --nproc-per-node 2 examples/torch_loop.py               # torchrun starts them

It differs from a loop for one process in `ring.init`, a sampler, equal initial weights, and a wrapped optimizer.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--ranks", type=int, default=2, help="number of processes, unless a launcher has started them already"
)
arguments = parser.parse_args()

batch_size = 32  # per rank; two ranks together use 64 digits per step
learning_rate = 1e-3  # for one rank; multiplied by the number of ranks, because the batch grows with them
epochs = 20  # over which the learning rate falls to zero; more epochs do not improve the accuracy
validation_digits = 360  # a fifth of the 1,797
seed = 1


started = time.perf_counter()
ring.init(ranks=arguments.ranks)
torch.manual_seed(seed + ring.rank())  # every rank drops different neurons

scans = load_digits()
images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16  # 8 x 8 pixels of 0 to 16
digits = TensorDataset(images, torch.tensor(scans.target))
training, validation = random_split(
    digits,
    [len(digits) - validation_digits, validation_digits],
    torch.Generator().manual_seed(seed),  # the same split on every rank
)
sampler = DistributedSampler(training, ring.size(), ring.rank(), seed=seed, drop_last=True)
loader = DataLoader(training, batch_size, sampler=sampler, drop_last=True)

model = nn.Sequential(
    nn.Conv2d(1, 32, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.3),
    nn.Linear(64 * 4 * 4, 128),
    nn.ReLU(),
    nn.Dropout(0.3),
    nn.Linear(128, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate * ring.size())
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
optimizer = DistributedOptimizer(optimizer, model.named_parameters())
# Until here every rank has different random weights; now all ranks get rank 0's.
broadcast_parameters(model)
broadcast_optimizer_state(optimizer)

step_seconds = 0.0
for epoch in range(epochs):
    sampler.set_epoch(epoch)  # a new order in each epoch, the same on every rank
    for images, labels in loader:
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()  # gradients are averages when this returns
        optimizer.step()
        step_seconds += time.perf_counter() - began
    schedule.step()
    if ring.rank() == 0:
        print(f"epoch {epoch + 1}, loss {loss.item():.4f}")

# Every rank validates every size-th digit, and the counts are summed.
model.eval()
images, labels = validation[list(range(ring.rank(), len(validation), ring.size()))]
with torch.no_grad():
    right = (model(images).argmax(1) == labels).sum()
accuracy = ring.all_reduce(right, ring.SUM).item() / len(validation)

if ring.rank() == 0:
    print(
        f"ranks {ring.size()}, {time.perf_counter() - started:.1f} s, validation accuracy {accuracy:.3f}, "
        f"{optimizer.waited_seconds / step_seconds:.0%} of a step spent waiting for communication"
    )
ring.shutdown()
