"""GPUs of ranks that count as several hosts: `LocalUpdates` against one process that simulates the hosts, and 8 bits.

Gradients in 8 bits against those of CPU ranks: the arithmetic is the same, so weights have to be, bit for bit.
"""

import os

import torch
from torch import nn

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, GradientAverager, LocalUpdates, broadcast_parameters
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
rank, size = ring.rank(), ring.size()
hosts = ring.all_gather_object(ring.node_rank())
device = torch.device("cuda", rank)  # the hosts are one in truth
torch.cuda.set_device(device)
STEPS, EVERY, OUTER, LR = 7, 3, (0.9, 0.6), 0.1


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3))


def loss_of(model: nn.Module, step: int, of: int, where: torch.device) -> torch.Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + of)).to(where)
    return (model(x) - x[:, :3].square()).square().mean()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().cpu().reshape(-1) for one in model.parameters()])


def kinds(model: nn.Module) -> int:
    """How many different weights the ranks have."""
    return len({one.numpy().tobytes() for one in ring.all_gather_object(flat(model))})


def trained(codec: str | None) -> torch.Tensor:
    model = network(rank).to(device)
    broadcast_parameters(model)
    inner = torch.optim.Adam(model.parameters(), LR)
    optimizer = LocalUpdates(inner, model, every=EVERY, outer=OUTER, compression=codec)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank, device).backward()
        optimizer.step()
    with optimizer.at_anchor():
        report(
            f"anchors are equal, {codec}", len({one.numpy().tobytes() for one in ring.all_gather_object(flat(model))})
        )
    optimizer.finish()
    saved = optimizer.state_dict()["local_updates"]["exchanges"]
    report(f"weights are equal, {codec}", kinds(model))
    report(f"exchanges, {codec}", saved)
    optimizer.close()
    return flat(model)


def simulated() -> torch.Tensor:
    models = {host: network() for host in dict.fromkeys(hosts)}
    optimizers = {host: torch.optim.Adam(model.parameters(), LR) for host, model in models.items()}
    anchor, velocity = flat(network()), torch.zeros_like(flat(network()))
    for step in range(STEPS):
        for host, model in models.items():
            optimizers[host].zero_grad()
            own = [of for of in range(size) if hosts[of] == host]
            (sum(loss_of(model, step, of, torch.device("cpu")) for of in own) / len(own)).backward()
            optimizers[host].step()
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            change = sum(flat(models[host]) for host in hosts) / size - anchor
            velocity = OUTER[1] * velocity + change
            anchor += OUTER[0] * (change + OUTER[1] * velocity)
            for model in models.values():
                nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
    return anchor


class Branching(nn.Module):
    """Of which ranks use another branch in each step, so that some have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branches = network(), nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.trunk(x)
        return y if self.step % 3 == 2 else self.branches[(self.step + rank) % 2](y)


def averaged(where: torch.device, codec: str | None, **options: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = Branching().to(where)
    inner = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), compression=codec, bucket_bytes=256, **options)
    for model.step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, model.step, rank, where).backward()
        optimizer.step()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0, rank, where)
        loss.backward()
        return loss

    report(f"loss, {where.type}, {codec}", float(optimizer.step(closure)))
    report(f"kinds of weights, {codec}, {options}", kinds(model))
    optimizer.close()
    return flat(model)


cpu = torch.device("cpu")
exact, rounded = averaged(device, None), averaged(device, "int8")
report("rounds", not torch.equal(exact, rounded))
report("off by", float((exact - rounded).abs().max()))
for options in ({}, {"overlap": True}, {"overlap": False}, {"error_feedback": False}):
    on_gpu, on_cpu = averaged(device, "int8", **options), averaged(cpu, "int8", **options)
    report(f"as on CPUs, {options}", torch.equal(on_gpu, on_cpu))
team = ring.Group.split(ring.node_rank())  # inside a host NCCL averages, and nothing is rounded
averager = GradientAverager(network().to(device), compression="int8", group=team)
report("inside a host", (team.size, type(averager.communicator).__name__))
averager.close()
team.close()
try:
    GradientAverager(nn.Embedding(4, 2, sparse=True).to(device), compression="int8")
except ring.ArgumentError as error:
    report("sparse", str(error))
report("unlike one process", float((trained(None) - simulated()).abs().max()))
report("unlike, in 8 bits", float((trained("int8") - simulated()).abs().max()))
