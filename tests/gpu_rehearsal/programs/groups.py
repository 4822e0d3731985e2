"""Groups on GPUs: two at once, each with NCCL communicators of its own, which end with close()."""

import os

import pytest
import torch
from torch import nn

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.torch import DistributedOptimizer, GradientAverager, broadcast_parameters
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
rank, size = ring.rank(), ring.size()
device = torch.device("cuda", ring.local_rank())
torch.cuda.set_device(device)
mine = ring.Group(range(rank % 2, size, 2))
number = rank + 1.0


def batch(of: int) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(of))


def weights(*models: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().cpu().reshape(-1) for model in models for parameter in model.parameters()])


def names() -> list[str]:
    """Of the communicators that have one of NCCL's."""
    return sorted(one.name for one in current().device_executors() if one.failure.error is None)


total = sum(other + 1.0 for other in mine.ranks)
for _ in range(3):  # of the group and of all ranks in turn
    found = ring.all_reduce(torch.full((4,), number, device=device), ring.SUM, group=mine)
    assert found.is_cuda and found.tolist() == [total] * 4, found
    assert ring.all_reduce(torch.full((4,), number, device=device), ring.SUM).tolist() == [size * (size + 1) / 2] * 4
root = mine.ranks[-1]
assert ring.broadcast(torch.full((2,), number, device=device), root, group=mine).tolist() == [root + 1.0] * 2
gathered = ring.all_gather(torch.full((1,), number, device=device), group=mine)
assert gathered.tolist() == [other + 1.0 for other in mine.ranks]
pairs = [ring.Group(sorted({one, (one + 1) % size})) for one in range(size)]
for pair in pairs:  # overlapping ones in turn
    if rank in pair:
        found = ring.all_reduce(torch.full((4,), number, device=device), ring.SUM, group=pair)
        assert found.tolist() == [sum(other + 1.0 for other in pair.ranks)] * 4
    pair.close()
alone = ring.Group([rank])
assert ring.all_reduce(torch.full((4,), number, device=device), ring.SUM, group=alone).tolist() == [number] * 4
alone.close()
report("in use", names())

torch.manual_seed(0)
dense, expert = nn.Linear(3, 3).to(device), nn.Linear(3, 2).to(device)
broadcast_parameters(dense)
broadcast_parameters(expert, mine.ranks[0], group=mine)
averagers = GradientAverager(dense), GradientAverager(expert, group=mine)
optimizer = torch.optim.Adam([*dense.parameters(), *expert.parameters()], 0.05)
for _ in range(4):
    optimizer.zero_grad()
    expert(dense(batch(rank).to(device))).square().mean().backward()
    optimizer.step()
report("in training", names())
for averager in averagers:
    averager.close()
report("equal", [
    all(torch.equal(own, other) for other in ring.all_gather_object(own, group=group))
    for own, group in ((weights(dense), None), (weights(expert), mine))
])  # fmt: skip

torch.manual_seed(0)  # the same in one process
dense_too, experts = nn.Linear(3, 3), nn.Linear(3, 2)
copies = [nn.Linear(3, 2) for _ in range(2)]
for one in copies:
    one.load_state_dict(experts.state_dict())
optimizer = torch.optim.Adam([*dense_too.parameters(), *(p for one in copies for p in one.parameters())], 0.05)
for _ in range(4):
    optimizer.zero_grad()
    for other in range(size):
        (copies[other % 2](dense_too(batch(other))).square().mean() / size).backward()
    for i, one in enumerate(copies):
        for parameter in one.parameters():
            parameter.grad *= size / len(range(i, size, 2))
    optimizer.step()
report("unlike one process", float((weights(dense, expert) - weights(dense_too, copies[rank % 2])).abs().max()))

model = nn.Linear(3, 1).to(device)
broadcast_parameters(model, mine.ranks[0], group=mine)
sharded = DistributedOptimizer(
    torch.optim.Adam(model.parameters(), 0.05), model.named_parameters(), group=mine, shard=True
)
for _ in range(3):
    sharded.zero_grad()
    model(batch(rank).to(device)).sum().backward()
    sharded.step()
own = weights(model)
report("sharded", all(torch.equal(own, other) for other in ring.all_gather_object(own, group=mine)))
sharded.close()

mine.close()
with pytest.raises(ring.RingError, match="after it has been closed"):
    ring.all_reduce(torch.ones(1, device=device), group=mine)
report("at the end", names())
ring.shutdown()
