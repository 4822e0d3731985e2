"""Gradients that are only this rank's are averaged before an optimizer uses them; a fake averager counts."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ring_plugins.torch import own_gradients
from ring_plugins.torch.own_gradients import OwnGradients


class Claim:
    is_superseded = False

    def newer(self):
        return [self] if self.is_superseded else []


class Averager:
    is_closed, is_on_host = False, True

    def __init__(self):
        self.parameter = nn.Parameter(torch.ones(2))
        self.parameter.grad = torch.ones(2)
        self.own, self.claim = OwnGradients(self), Claim()
        self.own.watch()
        self.steps, self.log = 1, []

    @property
    def named_parameters(self):
        return [("weight", self.parameter)]

    def average_before_step(self):
        self.log.append(f"average at {self.parameter.tolist()[0]:g}")
        self.steps += 1
        self.own.clear()

    def begin_step(self):
        self.log.append("begin")

    @property
    def checks(self):
        return SimpleNamespace(updates=SimpleNamespace(add=lambda: self.log.append("update")))


@pytest.fixture
def averager():
    made = Averager()
    made.sgd = torch.optim.SGD([made.parameter], 1.0)
    made.sgd.step()  # from then on it is known which gradients a reduction has left
    made.log.clear()
    made.parameter.grad = torch.ones(2)
    made.steps += 1  # reduced by a backward
    return made


def test_gradients_since_the_last_reduction_are_averaged_once_before_the_update(averager):
    averager.own.present = True
    value = averager.parameter.tolist()[0]
    averager.sgd.step()
    assert averager.log == [f"average at {value:g}", "begin", "update"]
    assert averager.own.sees_steps
    averager.log.clear()
    averager.steps += 1
    averager.sgd.step()
    assert averager.log == ["begin", "update"]


def test_gradients_that_a_script_assigned_without_a_backward_are_averaged(averager):
    averager.sgd.step()
    averager.log.clear()
    averager.parameter.grad = torch.full((2,), 3.0)
    averager.sgd.step()
    assert averager.log[0].startswith("average")
    averager.log.clear()
    averager.sgd.step()  # with the same ones again, as one process may
    assert averager.log == ["begin", "update"]


def test_a_closure_comes_first(averager):
    def closure():
        averager.log.append("closure")
        averager.own.present = True
        return torch.zeros(())

    averager.sgd.step(closure)
    assert averager.log[0] == "closure"
    assert averager.log[1].startswith("average")


def test_a_scaler_looks_at_averages_and_makes_no_step(averager):
    averager.own.present = True
    own_gradients.before_use(averager.sgd, is_step=False)
    (found,) = averager.log
    assert found.startswith("average")


@pytest.mark.parametrize("change", ["is_closed", "is_superseded"])
def test_an_averager_that_is_closed_or_superseded_averages_nothing(averager, change):
    averager.own.present = True
    setattr(averager.claim if change == "is_superseded" else averager, change, True)
    averager.sgd.step()
    assert not any(one.startswith("average") for one in averager.log)


def test_optimizers_of_other_parameters_are_left_alone(averager):
    averager.own.present = True
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    torch.optim.SGD([other], 1.0).step()
    assert averager.log == []


def test_what_a_script_writes_to_gradients_is_noticed(averager):
    averager.own.note()
    assert not averager.own.were_changed
    averager.parameter.grad.mul_(2)
    assert averager.own.were_changed
    averager.own.note()
    averager.parameter.grad = averager.parameter.grad * 2  # a new one, which is allowed
    assert not averager.own.were_changed
