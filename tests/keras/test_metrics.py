"""Metrics are computed from all ranks' data."""

import pytest

from tests.keras.launches import on_ranks


@on_ranks("metrics_of_uneven_shards", "torch", "jax", slow=("tensorflow",))
def test_metrics_are_those_of_all_data(seen):
    for found in seen:
        assert found["evaluate"] == pytest.approx(found["expected"], rel=1e-6)
        assert found["validation"] == pytest.approx(found["expected"], rel=1e-6)
        assert found["local"]["auc"] != pytest.approx(found["expected"]["auc"], rel=1e-3)
        assert found["validations"] == 1
        assert found["history"] == found["seen"] == pytest.approx(found["expected"]["auc"], rel=1e-6)
        assert not found["left"], "the model's method was not restored"


@on_ranks("metric_that_is_no_sum", "torch", slow=("tensorflow", "jax"))
def test_a_metric_that_is_no_sum_is_averaged_with_a_warning(seen):
    first, second = seen
    assert first["largest"] == second["largest"] == pytest.approx(2.0)
    assert len(first["said"]) == 1 and "largest" in first["said"][0]
    assert second["said"] == []


@on_ranks("results_that_are_variables", "torch", slow=("tensorflow", "jax"))
def test_a_result_that_is_a_variable_is_that_of_all_data(seen):
    both = [32.0, 32.0]
    expected = dict.fromkeys(("variable", "value", "tensor", "view", "array", "one", "thresholds"), both)
    expected |= {"other": [32.0], "true": [32.0], "averaged": [16.0, 16.0], "half": [16.0, 16.0], "quarter": [8.0]}
    assert seen == [[expected, []]] * 2


@on_ranks("progress_bars_of_evaluate_and_predict", "torch", slow=("tensorflow", "jax"))
def test_one_rank_shows_the_progress_of_evaluate_and_predict(seen):
    first, second = seen
    assert first > 0
    assert second == 0


@on_ranks("metrics_of_own_classes", "torch", slow=("tensorflow", "jax"))
def test_whether_a_state_is_a_sum_is_tried(seen):
    for rank, (alone, together) in enumerate(seen):
        kinds = "loss", "meanerror", "smoothed", "neverreset", "errorofparts", "abovethreshold", "sumoflarge"
        names = [f"{kind} {epoch}" for kind in kinds for epoch in (0, 1)]
        assert {name: together["history"][name] for name in names} == pytest.approx(
            {name: alone["history"][name] for name in names}, rel=1e-5
        )
        assert together["history"] == seen[0][1]["history"]
        assert len(together["said"]) == (rank == 0)
        others = "last, movingaverage, halfsum, besidelarge, lowest"
        assert all(f"the state of {others} is not a sum" in text for text in together["said"])
        assert together["left"] == []
        # The trial has changed neither the metric's own attributes nor the random numbers.
        assert (together["calls"], together["random"]) == (alone["calls"], alone["random"])


@on_ranks("invalid_names_of_metrics", "torch")
def test_names_of_metrics_are_a_list(seen):
    for errors in seen:
        assert all(error.startswith("ArgumentError: averaged=") for error in errors), errors
