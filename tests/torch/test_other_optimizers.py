"""Which parameters of other optimizers are compared, in one process that stands for a rank."""

import pytest
import torch

from ring_plugins.torch.other_optimizers import OtherOptimizers


class Partitioned(torch.optim.Optimizer):
    """As ZeroRedundancyOptimizer: has all parameters, and an optimizer inside that has those of this rank."""

    def __init__(self, parameters, own):
        super().__init__(parameters, {})
        self.inside = torch.optim.Adam(own)

    def step(self, closure=None):
        self.inside.step(closure)


@pytest.mark.parametrize("own", [slice(0, 1), slice(2, 0, -1), slice(None)], ids=["first", "others", "all"])
def test_an_optimizer_inside_another_is_not_compared_since_ranks_may_have_different_parts(own):
    others, parameters = OtherOptimizers(), [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for one in parameters:
        one.grad = torch.ones(2)
    alone = torch.nn.Parameter(torch.ones(1))
    optimizer, second = Partitioned(parameters, parameters[own]), torch.optim.SGD([alone], 0.1)
    optimizer.step()
    second.step()
    found = others._stepped()
    assert [(id(one), kind) for one, kind in found] == [
        *((id(one), "Partitioned") for one in parameters),
        (id(alone), "SGD"),
    ]
    assert not others._stepped()
