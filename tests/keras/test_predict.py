"""Evaluation and prediction see every sample once, on any number of ranks, and give what one process would."""

import numpy as np
import pytest

from tests.keras.launches import BACKENDS, case, on_ranks

ANY_NUMBER = [case(backend, 2, "exact_evaluation", slow=True) for backend in BACKENDS]
ANY_NUMBER += [case("torch", ranks, "exact_evaluation", slow=True) for ranks in (3, 5)]


@pytest.mark.parametrize("seen", ANY_NUMBER, indirect=True)
def test_evaluate_and_predict_are_exact(seen):
    for found in seen:
        for what, one in found.items():
            assert one["metrics"] <= 2e-7, what  # float32 holds the states of metrics: 1.2e-7 is its last bit at 1
            assert one.get("in float64", 0) <= 1e-7, what  # where Keras does not round the states to float32
            assert one["predictions"] <= 1e-6, what
            assert one["shape"] == [int(what.split()[0]), 1], what


@on_ranks("decisions_by_validation", slow=BACKENDS)
def test_callbacks_see_the_same_numbers_on_all_ranks(seen):
    first, second = seen
    assert first["history"] == second["history"]
    assert len(first["history"]["loss"]) == 4
    assert len(set(first["history"]["learning_rate"])) > 1
    assert first["last"] <= 1e-6


def test_batches_are_put_in_the_order_of_the_data():
    from ring_plugins.keras.predict import _in_order

    sizes = [2, 2, 1], [2, 2], [2, 1]
    parts = [0, 1, 6, 7, 10], [2, 3, 8, 9], [4, 5, 99]
    found = _in_order(sizes, [np.array(part) for part in parts])
    assert found.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 99, 10]
