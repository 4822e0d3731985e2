"""An averager looks at everything unusual once, and again when something has changed."""

import threading

import pytest
import torch
from torch import nn

from ring_plugins.torch import GradientAverager, changes
from tests.core.collectives.thread_ranks import on_thread_ranks


def test_no_two_changes_have_one_number_in_any_thread():
    seen = [set() for _ in range(4)]

    def run(own):
        for _ in range(1000):
            changes.note()
            own.add(changes.last)

    threads = [threading.Thread(target=run, args=(own,)) for own in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = changes.last
    changes.note()
    assert changes.last != before
    assert changes.last not in set.union(*seen)


def on_two_ranks(change):
    """How often both ranks' averagers look in each of five ordinary steps, and in the one behind a change."""

    def run(rank, communicator):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        averager = GradientAverager(model, communicator=communicator, overlap=False)
        looks, prepare = [], averager._prepare

        def counted():
            looks[-1] += 1
            return prepare()

        averager._prepare = counted
        for step in range(10):
            if step == 9:
                change(model, averager)
            looks.append(0)
            communicator.barrier()
            averager.forget_gradients()
            averager.prepare()
            model(torch.ones(1, 3)).sum().backward()
        averager.close()
        return looks[4:]

    return on_thread_ranks(2, run)


def freeze(model, averager):
    model[0].weight.requires_grad_(False)


def register(model, averager):
    model.extra = nn.Identity()


def hold(model, averager):
    averager._sets.hold_trained()


def drop_buckets(model, averager):
    averager._sets.drop_all()


def raise_in_backward(model, averager):
    handle = model[0].bias.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 3)).sum().backward()
    handle.remove()


@pytest.mark.parametrize("change", [freeze, register, hold, drop_buckets, raise_in_backward])
def test_an_ordinary_step_does_not_look_and_one_behind_a_change_does(change):
    for looks in on_two_ranks(change):
        assert looks[:5] == [0] * 5
        assert looks[5] > 0
