"""Train on scanned digits with steps of the same samples on any number of ranks, while two are killed.

    python examples/steady_batch.py                    # four processes; one of them is killed in epochs 2 and 3
    python examples/steady_batch.py --kill             # nobody is killed
    python examples/steady_batch.py --ranks 2 --kill   # two processes from the start

All three print the same checksum of the weights: the batch, the order of the samples, the dropped neurons and the sums
of the gradients are those of the job, not of its ranks.
"""

import argparse
import os
import signal
import zlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, GlobalBatches, TrainingState, broadcast_parameters

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=4, help="number of processes")
parser.add_argument("--kill", type=int, nargs="*", default=[2, 3], help="epochs in which a rank is killed")
arguments = parser.parse_args()

batch_size = 16  # of a pass
global_batch_size = 64  # of a step, on all ranks together: four passes, whoever makes them
epochs = 4

ring.init(ranks=arguments.ranks, on_failure="continue")
torch.manual_seed(1)
torch.set_num_threads(1)  # other numbers of threads may round differently

scans = load_digits()
images = torch.tensor(scans.images, dtype=torch.float32).flatten(1) / 16  # 8 x 8 pixels of 0 to 16
digits = TensorDataset(images, torch.tensor(scans.target))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
broadcast_parameters(model)
optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), 1e-3), model.named_parameters())
loader = DataLoader(digits, batch_size, shuffle=True)  # no DistributedSampler
steps = GlobalBatches(loader, optimizer, global_batch_size=global_batch_size, exact=True)
state = TrainingState(model=model, optimizer=optimizer, steps=steps, epoch=1)

for state.epoch in range(state.epoch, epochs + 1):  # noqa: B020 - the range is made once
    is_victim = state.epoch in arguments.kill and ring.size() > 1 and ring.rank() == (state.epoch + 1) % 2
    for step in steps:
        for x, y in step:
            if is_victim and step.first == 5 * global_batch_size:
                os.kill(os.getpid(), signal.SIGKILL)
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        state.commit()
    if ring.rank() == 0:
        print(f"epoch {state.epoch}, ranks {ring.size()}, steps {len(steps)}")

if ring.rank() == 0:
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    model.eval()
    right = (model(images).argmax(1) == digits.tensors[1]).float().mean().item()
    print(f"ranks {ring.size()}, accuracy {right:.3f}, weights {zlib.crc32(weights):08x}")
ring.shutdown()
