"""A captured step equals the same steps run eagerly; then the script ends while the graph lives, as scripts do."""

from ring_plugins.torch import DistributedOptimizer
from tests.gpu.card import DEVICE, RANK, fact, flat, needs_a_card, synchronize, torch

needs_a_card()
nn = torch.nn


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 4)).to(DEVICE)
    return own, DistributedOptimizer(torch.optim.SGD(own.parameters(), 0.05), own.named_parameters())


def batch(i: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * i + RANK)).to(DEVICE)


def step(own: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    own(x).square().mean().backward()
    optimizer.step()


eager, plain = build()
for i in range(8):
    step(eager, plain, batch(i))
    synchronize()
own, optimizer = build()
x, side = batch(0), torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for i in range(4):
        x.copy_(batch(i))
        step(own, optimizer, x)
        synchronize()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step(own, optimizer, x)
for i in range(4, 8):
    x.copy_(batch(i))
    graph.replay()
    synchronize()
fact(check="captured step", equal=bool(torch.allclose(flat(own), flat(eager), rtol=1e-5, atol=1e-6)))
