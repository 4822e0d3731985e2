"""Events of autograd, in one process."""

import gc

import pytest
import torch
from torch import nn

from ring_plugins.torch.autograd import Backward, registrations, when_accumulated


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("boom")


def test_a_parameter_that_is_frozen_now_calls_once_it_is_unfrozen():
    weight, seen = nn.Parameter(torch.ones(2), requires_grad=False), []
    (hook,) = when_accumulated(weight, seen.append)
    assert not weight.requires_grad
    weight.requires_grad_(True)
    weight.sum().backward()
    assert len(seen) == 1
    hook.remove()
    weight.sum().backward()
    assert len(seen) == 1


def test_integers_have_no_gradients():
    assert when_accumulated(nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False), print) == []


def test_the_end_of_a_backward_is_reported_once():
    ends = []
    backward = Backward(lambda: (ends.append(backward.is_running), backward.end()))
    weight = nn.Parameter(torch.ones(2))
    weight.register_post_accumulate_grad_hook(lambda _: backward.begin())
    weight.sum().backward()
    assert ends == [True]
    assert not backward.is_running


def test_a_backward_that_raised_is_not_running():
    backward = Backward(lambda: pytest.fail("it did not end"))
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    second.register_post_accumulate_grad_hook(lambda _: backward.begin())
    with pytest.raises(ValueError, match="boom"):
        (Boom.apply(first * 1.0) + second).sum().backward()
    gc.collect()
    assert not backward.is_running


def test_new_parameters_and_modules_are_counted():
    model = nn.Linear(2, 2)
    before = registrations()
    model.extra = nn.Parameter(torch.ones(1))
    model.child = nn.Identity()
    assert registrations() == before + 2
