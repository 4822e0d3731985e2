"""An optimizer that wraps another has the other's groups, state and options, also for what torch does to it."""

import pytest
import torch
from torch import nn

from ring_plugins.torch.wrapped_optimizer import WrappedOptimizer


class Wrapping(WrappedOptimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


@pytest.fixture
def wrapped():
    return Wrapping(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9))


def test_groups_state_and_defaults_are_the_others_and_may_be_replaced(wrapped):
    assert wrapped.param_groups is wrapped.optimizer.param_groups
    assert wrapped.state is wrapped.optimizer.state
    assert wrapped.defaults["momentum"] == 0.9
    wrapped.param_groups, wrapped.state = [{"params": []}], {}
    assert (wrapped.optimizer.param_groups, wrapped.optimizer.state) == ([{"params": []}], {})


def test_schedulers_set_the_others_rate(wrapped):
    scheduler = torch.optim.lr_scheduler.StepLR(wrapped, 1, gamma=0.5)
    wrapped.step()
    scheduler.step()
    assert wrapped.optimizer.param_groups[0]["lr"] == 0.05


def test_what_a_scaler_sets_around_a_step_reaches_the_other(wrapped):
    wrapped.grad_scale = torch.tensor(2.0)
    wrapped.found_inf = torch.tensor(0.0)
    assert wrapped.optimizer.grad_scale.item() == 2.0
    assert wrapped.optimizer.found_inf.item() == 0.0
    del wrapped.grad_scale, wrapped.found_inf
    assert not hasattr(wrapped.optimizer, "grad_scale")
    assert not hasattr(wrapped, "found_inf")


def test_other_attributes_are_the_others_but_not_while_a_copy_is_made(wrapped):
    wrapped.optimizer.own = 3
    assert wrapped.own == 3
    assert wrapped.synchronize() is None
    with pytest.raises(AttributeError, match="optimizer"):
        object.__new__(Wrapping).anything  # noqa: B018 - pickle asks so
