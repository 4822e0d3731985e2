"""On JAX, a compiled step makes one host call between backward and update."""

import pytest

from tests.keras.launches import on_ranks


@on_ranks("trial_of_overlap", "jax")
def test_jax_tries_no_overlap_as_backward_is_over_before_its_one_call(seen):
    assert seen == [{"auto": {"tries": False, "overlaps": False}, "True": {"tries": False, "overlaps": True}}] * 2


@on_ranks("two_optimizers_in_one_compiled_step", "jax")
def test_two_optimizers_in_one_compiled_step(seen):
    for found in seen:
        assert found["found"] == pytest.approx(found["expected"], abs=1e-5)


@on_ranks("eager_fit", "jax")
def test_an_eager_fit_whose_variables_have_no_values_reads_weights_between_steps(seen):
    first, second = seen
    assert first[0] == "none"
    assert first == second
