"""Events of autograd and of optimizers, in one process; fake averagers write down what happens."""

import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ring_plugins.core.control.wait import hindrances
from ring_plugins.torch import changes
from ring_plugins.torch import hooks as torch_hooks
from ring_plugins.torch.hooks import Hooks, OwnGradients, when_accumulated


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


class CountedHooks(Hooks):
    """Counts the ends of backwards."""

    def __init__(self, averager, order):
        super().__init__(averager, order, None)

    def end(self, callback=None):
        self.averager().ended += 1
        super().end(callback)


class Averager:
    """Writes down when its backward launches and finishes."""

    def __init__(self, log, order=0):
        self.log, self.name, self.ended = log, f"averager {order}", 0
        self.hooks = CountedHooks(self, order)

    def launch_rest(self):
        self.log.append(("launch", self.name))

    def end_backward(self):
        assert self.hooks.is_running
        self.hooks.end()
        self.log.append(("finish", self.name))

    def begin(self, _=None):
        if not self.hooks.is_running:
            self.hooks.begin([], counts=False)


def test_the_end_of_a_backward_is_reported_once():
    averager = Averager([])
    weight = nn.Parameter(torch.ones(2))
    weight.register_post_accumulate_grad_hook(averager.begin)
    weight.sum().backward()
    assert averager.log == [("finish", "averager 0")]
    assert not averager.hooks.is_running


def test_averagers_of_one_backward_launch_all_before_any_is_finished_in_their_order():
    log = []
    averagers = [Averager(log, order) for order in range(3)]
    weights = [nn.Parameter(torch.ones(2)) for _ in averagers]
    for weight, averager in zip(weights, averagers[::-1], strict=True):
        weight.register_post_accumulate_grad_hook(averager.begin)
    sum(weight.sum() for weight in weights).backward()
    assert log == [(what, f"averager {order}") for what in ("launch", "finish") for order in range(3)]


def test_an_averager_that_cannot_launch_does_not_finish_and_the_others_do():
    log = []
    averagers = [Averager(log, order) for order in range(2)]
    weights = [nn.Parameter(torch.ones(2)) for _ in averagers]
    for weight, averager in zip(weights, averagers, strict=True):
        weight.register_post_accumulate_grad_hook(averager.begin)
    averagers[0].log = None  # so that its `launch` raises
    with pytest.raises(AttributeError):
        sum(weight.sum() for weight in weights).backward()
    assert log == [("launch", "averager 1"), ("finish", "averager 1")]


def test_backwards_inside_a_backward_end_with_it():
    averager = Averager([])
    layers = [nn.Linear(2, 2) for _ in range(3)]
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(averager.begin)

    def inner(x):
        return checkpoint(layers[1], checkpoint(layers[0], x, use_reentrant=True), use_reentrant=True)

    for _ in range(2):
        averager.log.clear()
        x = torch.ones(1, 2, requires_grad=True)
        checkpoint(layers[2], checkpoint(inner, x, use_reentrant=True), use_reentrant=True).sum().backward()
        assert averager.log == [("finish", "averager 0")]
        assert averager.hooks.is_nested
    averager.log.clear()
    layers[0](torch.ones(1, 2)).sum().backward()
    assert len(averager.log) == 1
    assert not averager.hooks.is_nested


def test_a_backward_that_raised_is_not_running():
    averager = Averager([])
    hooks = averager.hooks
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    second.register_post_accumulate_grad_hook(lambda _: hooks.begin([], counts=False))
    with pytest.raises(ValueError, match="boom"):
        (Boom.apply(first * 1.0) + second).sum().backward()
    gc.collect()
    assert not hooks.is_running
    assert hooks.callback() is None
    assert averager.log == []
    assert averager.ended == 1
    assert "a backward raised" in hindrances[hooks]
    hooks.end()
    assert hooks not in hindrances


@pytest.mark.parametrize("method", ["begin", "end_backward"])
def test_a_backward_that_raised_is_over_even_if_the_error_is_kept(method, monkeypatch):
    # The error's traceback refers to what autograd held, as sys.last_traceback does in a notebook.
    averager = Averager([])
    weight = nn.Parameter(torch.ones(1))
    weight.register_post_accumulate_grad_hook(averager.begin)
    with monkeypatch.context() as patches:
        where = (torch_hooks._EndOfBackward, "request") if method == "begin" else (Averager, method)
        patches.setattr(*where, lambda self: 1 / 0)
        averager.hooks = CountedHooks(averager, 0)
        with pytest.raises(ZeroDivisionError) as kept:
            weight.sum().backward()
    assert averager.hooks.has_raised
    assert averager.ended == 1
    averager.hooks = CountedHooks(averager, 0)
    weight.sum().backward()
    assert averager.log[-1:] == [("finish", "averager 0")]
    assert kept.traceback


def test_new_parameters_and_modules_are_counted():
    model = nn.Linear(2, 2)
    before = changes.registrations
    model.extra = nn.Parameter(torch.ones(1))
    model.child = nn.Identity()
    assert changes.registrations == before + 2


def test_backwards_in_several_threads_do_not_disturb_each_other():
    errors, ended = [], []
    others = [torch_hooks._EndOfBackward(Averager([]).hooks) for _ in range(200)]  # which take their time to look at
    for other in others:
        torch_hooks._pending.add(weakref.ref(other))

    def run():
        try:
            for _ in range(100):
                averagers, weights = [Averager([]) for _ in range(5)], [nn.Parameter(torch.ones(2)) for _ in range(5)]
                for weight, averager in zip(weights, averagers, strict=True):
                    weight.register_post_accumulate_grad_hook(averager.begin)
                sum(weight.sum() for weight in weights).backward()
                ended.extend(averager.ended for averager in averagers)
        except RuntimeError as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert ended == [1] * 3000


# Gradients that are only this rank's own ------------------------------------------------------------


class Claim:
    is_superseded = False

    def newer(self):
        return [self] if self.is_superseded else []


class Optimized:
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
    made = Optimized()
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
    torch_hooks.before_use(averager.sgd, is_step=False)
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
