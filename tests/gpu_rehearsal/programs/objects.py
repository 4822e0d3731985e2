"""What ranks send each other pickled comes to the receiver's GPU: objects of a strategy, and steps in join()."""

import torch
from lightning.fabric import Fabric

import ring_plugins as ring
from ring_plugins.lightning import RingFabricStrategy
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters, join
from tests.worker import report

fabric = Fabric(strategy=RingFabricStrategy(), accelerator="gpu", devices=2)
fabric.launch()
device = fabric.device
sent = {"on GPU": [torch.full((2,), 1.0 + fabric.global_rank, device=device)], "on CPU": torch.ones(1)}
told = fabric.broadcast(sent, src=1)
report("told", [str(told["on GPU"][0].device), told["on GPU"][0].tolist(), str(told["on CPU"].device)])


def trained(shard: bool) -> torch.Tensor:
    """The weights after as many batches as this rank has: rank 0 one, rank 1 three."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)).to(device)
    broadcast_parameters(model)
    rate = torch.tensor(0.01, device=device)
    adam = torch.optim.Adam(model.parameters(), rate, capturable=True)
    optimizer = DistributedOptimizer(adam, model.named_parameters(), shard=shard)
    generator = torch.Generator().manual_seed(ring.rank())
    with join(optimizer):
        for _ in range(1 + 2 * ring.rank()):
            optimizer.zero_grad()
            model(torch.randn(4, 5, generator=generator).to(device)).square().mean().backward()
            optimizer.step()
    optimizer.close()
    return torch.cat([weight.detach().cpu().flatten() for weight in model.parameters()])


weights = trained(False)
report("unlike rank 0", int((weights != torch.from_numpy(ring.broadcast(weights.numpy()))).sum()))
report("unlike a sharded one", float((trained(True) - weights).abs().max()))
report("finite", bool(weights.isfinite().all()))
