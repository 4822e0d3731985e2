"""Sums in the order of the micro-batches, whoever has them, and in whatever order they were computed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.torch import exact_averages
from ring_plugins.torch.exact_averages import ExactAverages, average_exactly


def averager(*parameters) -> Any:
    """One rank's, which does nothing but hold its parameters."""
    communicator = SimpleNamespace(rank=0, size=1, all_gather_object=lambda item, _: [item], reject=lambda *_: None)
    checks = SimpleNamespace(number=lambda: 7, note_compared=lambda: None)
    return SimpleNamespace(
        named_parameters=[(f"p{i}", one) for i, one in enumerate(parameters)],
        communicator=communicator,
        checks=checks,
        wants_change=lambda: False,
        note_averages=lambda: None,
        forget_gradients=lambda: None,
    )


def test_terms_are_added_up_in_the_order_of_their_numbers(monkeypatch):
    monkeypatch.setattr(exact_averages, "_PIECE", 20)
    dense, lacking, seldom = (nn.Parameter(torch.zeros(4)) for _ in range(3))
    rotated, halves = nn.Parameter(torch.zeros(2, 3).t()), nn.Parameter(torch.zeros(2, dtype=torch.float16))
    own = averager(dense, lacking, seldom, rotated, halves)
    part, terms = ExactAverages(own), {8: 1.0, 0: 1e8, 4: -1e8}
    for number, value in terms.items():
        dense.grad, rotated.grad, halves.grad = (
            torch.full_like(one, value if one is not halves else 1) for one in (dense, rotated, halves)
        )
        seldom.grad = torch.ones(4) if number == 4 else None
        part.take(number, 0.5 if number == 8 else 1)
        assert dense.grad is None
    assert average_exactly([part], [[8, 0, 4]], 2.5)
    assert dense.grad.tolist() == [torch.tensor(0.5).div(2.5).item()] * 4  # in the order of the calls it would be 0
    assert rotated.grad.stride() == rotated.stride() and rotated.grad.tolist() == [[dense.grad[0].item()] * 2] * 3
    assert lacking.grad is None and seldom.grad.tolist() == [torch.tensor(1.0).div(2.5).item()] * 4
    assert halves.grad.dtype == torch.float16


def test_a_sparse_gradient_is_rejected():
    weight = nn.Parameter(torch.zeros(3, 2))
    weight.grad = torch.eye(3, 2).to_sparse()
    with pytest.raises(ArgumentError, match=r"the gradient of p0 is sparse, .* use sparse=False"):
        ExactAverages(averager(weight)).take(0, 1)
