"""Training on several ranks gives what one process gives on the same batches, and every rank the same bits."""

from typing import Any

import pytest

from tests.keras.launches import launch

pytestmark = pytest.mark.timeout(900)  # the first test waits for everything that its launch looks at

EVERYWHERE = (
    "accumulation",
    "accumulation_in_mixed_precision",
    "accumulation_of_an_embedding",
    "adam",
    "batch_normalisation",
    "batch_normalisation_of_masked_steps",
    "clipping_weight_decay_and_moving_average",
    "convolution_with_momentum",
    "embedding",
    "fitted_before_without_and_twice_with",
    "frozen_layer_and_low_rank_adapter",
    "large_layer",
    "lazy_model",
    "mixed_precision",
    "moving_mean_of_own_batches",
    "two_outputs_with_weights",
)
SOMEWHERE = {
    "tensorflow": (
        "batch_normalisation_as_keras_spells_it",
        "class_weights",
        "compiled",
        "compiled_accumulation",
        "compiled_batch_normalisation",
        "compiled_several_steps_an_execution",
        "eager",
        "eager_accumulation",
        "explicit_optimizer",
        "gradient_of_nothing",
        "many_buckets",
        "remainder",
        "schedule",
        "several_accumulating_steps_an_execution",
        "several_steps_an_execution",
    ),
    "torch": ("class_weights", "explicit_optimizer", "gradient_of_nothing", "many_buckets", "remainder", "schedule"),
    "jax": ("eager_accumulation", "many_buckets", "not_compiled", "several_steps_an_execution"),
}
ON_THREE_RANKS = ("adam", "batch_normalisation", "convolution_with_momentum", "large_layer")

CASES = [(backend, 2, name) for backend, own in SOMEWHERE.items() for name in (*EVERYWHERE, *own)]
# What differs with the number of ranks is the same code on all backends; two of them are asked for by `-m slow`.
CASES += [("tensorflow", 3, name) for name in ON_THREE_RANKS]
SLOW_CASES = [
    pytest.param(backend, 3, name, marks=pytest.mark.slow) for backend in ("torch", "jax") for name in ON_THREE_RANKS
]


@pytest.mark.parametrize(("backend", "size", "name"), [*CASES, *SLOW_CASES])
def test_scenario(backend: str, size: int, name: str) -> None:
    result = launch(backend) if size == 2 else launch(backend, size, ",".join(ON_THREE_RANKS))
    check(result.values(name), size, name)


def test_no_scenario_goes_unchecked(backend: str) -> None:
    assert set(launch(backend).values("scenarios")[0]) == {
        name for where, size, name in CASES if (where, size) == (backend, 2)
    }


@pytest.mark.slow  # torch's compiler takes a minute or two
@pytest.mark.parametrize("backend", ["torch"])
def test_compiled_by_torch(backend: str) -> None:
    check(launch(backend, 2, "compiled_by_torch").values("compiled_by_torch"), 2, "compiled")


def check(found: list[Any], size: int, name: str) -> None:
    assert len(found) == size
    for comparison in found:
        assert "error" not in comparison, comparison["error"]
        assert comparison["disagreements"] == []
        assert comparison["compared"] > 0
        assert comparison["weights"] <= TOLERANCE.get(name, 1e-6)
        assert comparison["state"] <= TOLERANCE.get(name, 1e-5)


# Activations are in float16 there, and another size of batch lets sums round elsewhere.
TOLERANCE = {"mixed_precision": 1e-3, "accumulation_in_mixed_precision": 1e-3}
