"""A forward on two streams whose gradients come late: each bucket waits for both streams.

The reference is the rank's own gradient, computed without averaging; all ranks have the same batch, so it is the
average, too. A bucket that did not wait for a stream would hold numbers that its kernel has not written yet. torch's
default stream has the handle 0, of which `ExternalStream` makes another stream (pytorch#182960).
"""

from typing import Any

from ring_plugins.torch import GradientAverager
from tests.gpu.card import DEVICE, fact, needs_a_card, torch

needs_a_card()
nn = torch.nn
#: Clock cycles, some 0.2 s.
LATE = 400_000_000
side = torch.cuda.Stream()


class Late(torch.autograd.Function):
    """Backward keeps the stream of its branch busy before it hands the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(LATE)
        return gradient * 1.0


def gradients(own: nn.Module, x: torch.Tensor, first: str) -> torch.Tensor:
    main = torch.cuda.current_stream()

    def on_side() -> torch.Tensor:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            return Late.apply(own.b(x))

    def on_main() -> torch.Tensor:
        return Late.apply(own.a(x))

    left, right = (on_side(), on_main()) if first == "side" else tuple(reversed((on_main(), on_side())))
    main.wait_stream(side)
    (left.sum() + right.square().sum()).backward()
    torch.cuda.synchronize()
    return torch.cat([p.grad.flatten() for p in own.parameters()]).cpu()


for first in ("side", "main"):
    torch.manual_seed(0)
    own = nn.Module()
    own.a, own.b = nn.Linear(50, 50).to(DEVICE), nn.Linear(50, 50).to(DEVICE)
    x = torch.randn(8, 50, device=DEVICE)
    expected = gradients(own, x, first)
    for parameter in own.parameters():
        parameter.grad = None
    averager = GradientAverager(list(own.named_parameters()))
    found = gradients(own, x, first)
    fact(check="two streams", first=first, equal=bool(torch.allclose(found, expected, rtol=1e-5)))
    averager.close()
