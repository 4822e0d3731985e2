"""Train a mixture of experts: each group of ranks shares out the experts, and all ranks have the dense layers.

    python examples/experts.py                                       # starts the three other processes itself
    python examples/experts.py --ranks 1                             # one process: the same weights at the end
    mpirun -n 4 python examples/experts.py                           # mpirun starts the processes

Of four ranks, 0 and 1 have an expert each, and so have 2 and 3. A digit goes to the expert that its gate chooses,
within the `pair`, and comes back. Gradients of an expert are averaged over the ranks that have a copy of it (`copies`:
0 and 2, or 1 and 3), those of the dense layers over all ranks. So there are two optimizers with different parameters.
Gradients are clipped by the norm of all of them.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, all_to_all, broadcast_parameters

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=4, help="1, 2 or an even number of processes")
parser.add_argument("--steps", type=int, default=200)
arguments = parser.parse_args()

experts, width, batch_size, learning_rate = 2, 64, 64, 0.1  # the batch is that of all ranks together
most = 0.5  # of the norm of the gradients


class Experts(nn.Module):
    """This rank's experts; rows for others travel to the ranks of its pair that have these."""

    def __init__(self, pair: ring.Group) -> None:
        super().__init__()
        self.pair, self.gate = pair, nn.Linear(width, experts)
        every = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(experts)]
        here = experts // pair.size
        self.own = nn.ModuleList(every[pair.rank * here : (pair.rank + 1) * here])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = F.softmax(self.gate(x), 1).max(1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=experts)  # rows for each expert
        received = ring.all_to_all(counts, group=self.pair).view(self.pair.size, -1)  # from each rank, for each of mine
        per_rank = counts.view(self.pair.size, -1).sum(1).tolist()
        rows = all_to_all(x[order], per_rank, group=self.pair)  # passes gradients back the same way
        parts = rows.split(received.flatten().tolist())  # by sender, then by expert
        done = torch.cat([self.own[i % len(self.own)](part) for i, part in enumerate(parts)])
        back = all_to_all(done, received.sum(1).tolist(), group=self.pair)
        return x + weight.unsqueeze(1) * torch.zeros_like(x).index_copy(0, order, back)


started = time.perf_counter()
ring.init(ranks=arguments.ranks)
torch.manual_seed(1)  # equal on all ranks
size, rank = ring.size(), ring.rank()
shared_by = min(experts, size)
pair = ring.Group(range(rank - rank % shared_by, rank - rank % shared_by + shared_by))
copies = ring.Group(range(rank % shared_by, size, shared_by))

scans = load_digits()
images, labels = torch.tensor(scans.data, dtype=torch.float64) / 16, torch.tensor(scans.target)
middle = Experts(pair)
model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), middle, nn.Linear(width, 10)).double()

sharded = {id(parameter) for parameter in middle.own.parameters()}
dense = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in sharded]
of_all_ranks = [parameter for _, parameter in dense]
broadcast_parameters(dense)
broadcast_parameters(middle.own, root=copies.ranks[0], group=copies)
of_dense = DistributedOptimizer(torch.optim.SGD(of_all_ranks, learning_rate, momentum=0.9), dense)
of_experts = DistributedOptimizer(
    torch.optim.SGD(middle.own.parameters(), learning_rate, momentum=0.9), middle.own.named_parameters(), group=copies
)

for step in range(arguments.steps):
    batch = torch.arange(step * batch_size, (step + 1) * batch_size) % len(images)
    own = batch[rank::size]
    of_dense.zero_grad()
    of_experts.zero_grad()
    loss = F.cross_entropy(model(images[own]), labels[own])
    loss.backward()
    # An expert's gradient has terms of the losses of its whole pair, and is averaged over its copies: the sum of all
    # ranks' losses over the number of copies. Their mean is over the number of ranks.
    for parameter in middle.own.parameters():
        parameter.grad *= copies.size / size
    # Clipping needs the norm of all gradients, equal on all ranks; clip_grad_norm_ knows this rank's experts only.
    of_others, of_own = (sum(p.grad.square().sum() for p in some) for some in (of_all_ranks, middle.own.parameters()))
    norm = (of_others + ring.all_reduce(of_own, ring.SUM, group=pair)).sqrt()
    for parameter in model.parameters():
        parameter.grad *= (most / norm).clamp(max=1)
    of_dense.step()
    of_experts.step()

with torch.no_grad():
    loss = F.cross_entropy(model(images), labels)  # all ranks have all digits here
    weights = torch.stack([parameter.norm() for parameter in middle.own.parameters()]).square().sum()
weights = ring.all_reduce(weights, ring.SUM, group=pair)  # of all experts
if rank == 0:
    print(f"ranks {size}, {time.perf_counter() - started:.1f} s, loss {loss:.9f}, experts' weights {weights:.9f}")
ring.shutdown()
