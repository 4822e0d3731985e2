"""Compiled models end with the weights of the same model run eagerly: as a whole, and layer by layer."""

from ring_plugins.torch import DistributedOptimizer
from tests.gpu.card import DEVICE, RANK, SIMULATED, fact, flat, needs_a_card, ring, synchronize, torch

needs_a_card()
nn = torch.nn
#: "aot_eager" traces forward and backward as "inductor" does, and needs no compiler.
BACKEND = "aot_eager" if SIMULATED else "inductor"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(64, 1)).to(DEVICE)


def trained(how: str) -> torch.Tensor:
    own = model()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(own.parameters(), 0.1), own.named_parameters(), bucket_bytes=20_000
    )
    called: nn.Module = own
    if how == "whole":
        called = torch.compile(own, backend=BACKEND)
    elif how == "layers":
        called = nn.Sequential(*(torch.compile(layer, backend=BACKEND) for layer in own))
    for step in range(4):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + RANK)).to(DEVICE)
        optimizer.zero_grad()
        called(x).square().mean().backward()
        optimizer.step()
        synchronize()
    optimizer.close()
    return flat(own)


eager = trained("eager")
for how in ("whole", "layers"):
    ours = trained(how)
    rows = ring.all_gather(ours[None])
    worst = float((ours - eager).abs().max())
    fact(
        check="compiled",
        how=how,
        backend=BACKEND,
        same_on_all_ranks=all(torch.equal(rows[0], row) for row in rows),
        worst=worst,
        close=worst < 1e-5,
    )
