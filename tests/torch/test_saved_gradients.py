"""Gradients that autograd still has need no copy; those that somebody else may write to do."""

from types import SimpleNamespace

import pytest
import torch

from ring_plugins.torch import GradientAverager
from tests.core.collectives.mortal_ranks import on_mortal_ranks

#: Has exact averages over 1, 2 and 3 ranks.
UNIT = 6.0
COUNTS = (10, 300, 300_000)


def train(rank, model, steps, zero, number, how, overlap):
    """Averages of all steps, and the bytes that were copied for a repetition."""
    communicator = rank.communicator("gradients")
    averager = GradientAverager(model, communicator=communicator, bucket_bytes=4096, overlap=overlap)
    first, found, addresses = rank.barriers, [], []
    model[-1].register_post_accumulate_grad_hook(lambda p: addresses.append(p.grad.data_ptr()))
    if rank.rank == 1:
        rank.dies = lambda at: how if at - first == number else None
    for step in range(steps):
        zero(model)
        before = [p.grad for p in model]
        sum((p * torch.full_like(p, UNIT * 3**rank.rank * (step + 1))).sum() for p in model).backward()
        if before[-1] is not None:
            assert all(now.grad is then for now, then in zip(model, before, strict=True))
        found.append([sorted(set(p.grad.tolist())) for p in model])
        addresses.append(model[-1].grad.data_ptr())
    copies = averager._buckets.reducer.kept._copies
    return found, sum(copy.nbytes for copy in copies.values()), addresses


def no_job(monkeypatch):
    """The ranks are threads: nobody joins or leaves."""
    world = SimpleNamespace(is_joining=False, replaces=False, elastic=SimpleNamespace(view=0, wants_change=False))
    for module in ("consistency", "gradients"):
        monkeypatch.setattr(f"ring_plugins.torch.{module}.current", lambda: world)
    monkeypatch.setattr("ring_plugins.torch.gradients.has_room_to_overlap", lambda threads: False)


@pytest.mark.parametrize(
    ("in_place", "how", "overlap"),
    [
        (False, "in", False),
        (True, "before", True),
        (False, "before", True),
        pytest.param(True, "in", False, marks=pytest.mark.slow),
        pytest.param(True, "in", True, marks=pytest.mark.slow),
    ],
)
def test_a_pass_is_repeated_from_what_autograd_has_wherever_a_rank_dies(monkeypatch, in_place, how, overlap):
    no_job(monkeypatch)
    number, died = 0, True
    while died:
        number += 1

        def run(rank, number=number):
            torch.set_num_threads(1)
            model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(count)) for count in COUNTS])
            return train(rank, model, 3, lambda model: model.zero_grad(set_to_none=not in_place), number, how, overlap)

        results = on_mortal_ranks(monkeypatch, 3, run)
        died = results[1] is None
        (found, copied, addresses), (other, *_) = results[0], results[2]
        assert found == other
        for step, averages in enumerate(found):
            over = [[UNIT * (step + 1) * sum(3**rank for rank in ranks) / len(ranks)] for ranks in ((0, 1, 2), (0, 2))]
            assert averages[0] in over and averages == averages[:1] * len(COUNTS)
        if in_place:
            assert copied > 4 * sum(COUNTS) and len(set(addresses[1:])) == 1
        else:
            assert copied < 4 * COUNTS[1]  # flags and control numbers
            if not overlap:  # where the hook comes before the bucket's
                assert addresses[0] == addresses[3] and addresses[2] == addresses[5]  # a gradient, and the next average
    assert number >= 7  # the last run is one in which it lives


def test_memory_that_somebody_refers_to_takes_no_average(monkeypatch):
    no_job(monkeypatch)

    def run(rank):
        parameter, kept = torch.nn.Parameter(torch.zeros(COUNTS[-1])), []
        averager = GradientAverager([("p", parameter)], communicator=rank.communicator("gradients"))
        parameter.register_post_accumulate_grad_hook(lambda p: kept.extend([p.grad, p.grad.view(-1)[3:]][rank.rank :]))
        for _ in range(4):
            parameter.grad = None
            (parameter * torch.full_like(parameter, rank.rank + 1)).sum().backward()
            assert set(parameter.grad.tolist()) == {1.5}
            kept.append(parameter.grad)
        averager.close()
        return {value for tensor in kept for value in tensor.tolist()}

    assert on_mortal_ranks(monkeypatch, 2, run) == [{1.0, 1.5}, {2.0, 1.5}]
