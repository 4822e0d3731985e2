"""The optimizer's interface, with one rank."""

import copy
import io

import pytest
import torch
from torch import nn

from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.torch import DistributedOptimizer, gradients


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    monkeypatch.setattr(gradients, "communicator_for", lambda named, **_: SingleCommunicator("test"))


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


def test_it_rejects_what_it_cannot_do():
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ArgumentError, match="optimizer=Linear is not a torch.optim.Optimizer"):
        DistributedOptimizer(model)
    with pytest.raises(ArgumentError, match="named_parameters=Linear does not hold .* pass model.named_parameters"):
        DistributedOptimizer(inner, model)
    with pytest.raises(ArgumentError, match="named_parameters lacks 1 of the optimizer's parameters"):
        DistributedOptimizer(inner, [("only", model.weight)])
    with pytest.raises(ArgumentError, match="passes_per_step=0 is not a positive number"):
        DistributedOptimizer(inner, backward_passes_per_step=0)


def test_a_copy_has_the_state_but_steps_only_when_it_is_wrapped_anew():
    model = nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.1), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = io.BytesIO()
    torch.save({"model": model, "optimizer": optimizer}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    both = copy.deepcopy({"model": model, "optimizer": optimizer})
    for copied in (loaded, both):
        twin, its_model = copied["optimizer"], copied["model"]
        assert isinstance(twin, DistributedOptimizer) and isinstance(twin.optimizer, torch.optim.Adam)
        assert twin.param_groups[0]["params"][0] is its_model.weight is not model.weight
        assert torch.equal(twin.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
        for use in (twin.step, twin.zero_grad, twin.no_sync):
            with pytest.raises(RingError, match=r"is a copy.* averages no gradients. Wrap its inner optimizer again"):
                use()
        twin.close()
        anew = DistributedOptimizer(twin.optimizer, its_model.named_parameters())
        its_model(torch.ones(1, 2)).sum().backward()
        anew.step()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


class Two(SingleCommunicator):
    """Stands for two ranks with the same gradients."""

    def __init__(self):
        super().__init__("two")
        self.size, self.ranks, self.told = 2, (0, 1), []

    def all_gather_object(self, item, purpose=""):
        return 2 * super().all_gather_object(item)

    def interrupt(self, operation, cause):
        self.told.append(str(cause))


@pytest.fixture
def two(monkeypatch):
    made = Two()
    monkeypatch.setattr(gradients, "communicator_for", lambda named, **_: made)
    monkeypatch.setenv("RING_WEIGHT_CHECK", "0")
    return made


def test_a_closed_optimizer_uses_the_averages_it_has_and_then_steps_no_more(two):
    model = nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.close()
    optimizer.step()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RingError, match="has been closed and averages no gradients"):
        optimizer.step()
    with pytest.raises(RingError, match="has been closed"):
        optimizer.step(lambda: torch.ones(()))
    optimizer.zero_grad()
    optimizer.optimizer.step()


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("handles", [True, False])
def test_ranks_that_wait_for_a_pass_that_raised_are_told_when_it_is_closed(raises, handles, two):
    """Not while an exception is handled, which tells the cause when it ends the job."""
    model = nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    if raises:
        model.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 2)).sum().backward()
    else:
        model(torch.ones(1, 2)).sum().backward()
    if handles:
        try:
            raise ValueError
        except ValueError:
            optimizer.close()
    else:
        optimizer.close()
    assert two.told == ["its averager was closed before the gradients were averaged"] * (raises and not handles)
