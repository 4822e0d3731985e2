"""Gradients are averaged in custom training loops too."""

import pytest

from tests.keras.launches import BACKENDS, on_ranks


@on_ranks("accumulation_is_reduced_once_an_update", "torch", slow=("tensorflow", "jax"))
def test_accumulated_gradients_are_reduced_once_an_update(seen):
    first, second = seen
    assert first == second
    assert first["updates"] == 2


@on_ranks("overflow_on_one_rank", *BACKENDS)
def test_an_overflow_on_one_rank_lets_all_skip(seen):
    assert seen == [{"unchanged": True, "scale": 8.0}] * 2


@on_ranks("adversarial_training", "torch", slow=("tensorflow",))
def test_two_optimizers_in_one_step(seen):
    first, second = seen
    assert first["together"] == second["together"]
    for alone, together in zip(first["alone"], first["together"], strict=True):
        flat = [[v for row in a for v in row] if isinstance(a[0], list) else a for a in (alone, together)]
        assert flat[1] == pytest.approx(flat[0], rel=1e-5, abs=1e-6)


@on_ranks("own_loop", *BACKENDS)
def test_a_custom_training_loop(seen):
    for found in seen:
        assert found["found"] == pytest.approx(found["expected"])


@on_ranks("wrapped_after_a_step", *BACKENDS)
def test_steps_that_are_compiled_already_follow_their_optimizer(seen):
    assert seen == [[False, True, False]] * 2


@on_ranks("own_function_called_before_wrapping", "tensorflow", "jax", slow=("torch",))
def test_a_function_of_the_script_that_is_compiled_already_averages_or_is_rejected(seen):
    for found in seen:
        assert found["spread"] == 0
        rejected = "the tf.function _compiled_step.<locals>.traced has been called with this optimizer before"
        assert found["error"] == "none" or rejected in found["error"]


@on_ranks("gradient_on_one_rank_only", *BACKENDS)
def test_a_gradient_on_one_rank_only_is_an_error(seen):
    assert "this rank has no gradient for variable 1 (" in seen[0]
