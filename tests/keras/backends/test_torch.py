"""On torch, hooks average while backward runs; gradients that bypass them are averaged when they are applied."""

from types import SimpleNamespace

import pytest

from ring_plugins.keras.backends.torch import _AsOne
from ring_plugins.keras.consistency import KerasChecks
from tests.keras.launches import on_ranks


def test_passes_are_those_of_the_averager_whatever_a_rank_makes_of_them():
    averager, checks = SimpleNamespace(steps=0), KerasChecks(reads_in_pass=False)
    compared = _AsOne(checks, averager)
    for averager.steps in (0, 1, 2, 2, 5):
        compared.number  # noqa: B018 - a pass asks for it, before its end
        assert checks.passes == averager.steps


@on_ranks("gradients_from_elsewhere", "torch")
def test_gradients_that_bypass_the_hooks(seen):
    for found in seen:
        assert found == pytest.approx([-0.3] * 5)


@on_ranks("gradients_changed_after_backward", "torch")
def test_averaging_a_changed_gradient_leaves_the_others_as_they_are(seen):
    for found in seen:
        assert found["weights"] == [pytest.approx([-0.15] * 5), pytest.approx([-0.2])]
        assert found["gradients"] == [pytest.approx([1.5] * 5), pytest.approx([1.0])]


@on_ranks("gradients_of_frozen_variables", "torch")
def test_gradients_of_frozen_variables_are_averaged(seen):
    for found in seen:
        assert found["values"] == [pytest.approx([-0.15] * 3)] * 2
        assert found["is_frozen"]
