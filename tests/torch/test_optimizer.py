"""The optimizer's interface, with one rank."""

import pickle

import pytest
import torch
from torch import nn

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.torch import DistributedOptimizer, gradients


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    monkeypatch.setattr(gradients, "_communicator_for", lambda named: SingleCommunicator("test"))


def test_it_shares_state_and_groups_with_the_optimizer_it_wraps():
    model = nn.Linear(2, 1)
    inner = torch.optim.Adam(model.parameters(), 0.1)
    optimizer = DistributedOptimizer(inner, model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state is inner.state and len(inner.state) == 2
    assert optimizer.param_groups is inner.param_groups
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2


def test_it_refuses_what_it_cannot_do():
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ArgumentError, match="optimizer=Linear is not a torch.optim.Optimizer"):
        DistributedOptimizer(model)
    with pytest.raises(ArgumentError, match="named_parameters lacks 1 of the optimizer's parameters"):
        DistributedOptimizer(inner, [("only", model.weight)])
    with pytest.raises(ArgumentError, match="passes_per_step=0 is not a positive number"):
        DistributedOptimizer(inner, backward_passes_per_step=0)
    with pytest.raises(TypeError, match="save its state_dict"):
        pickle.dumps(DistributedOptimizer(inner))
