"""XLA compiles a train step in two parts, with the reduction between them."""

import pytest

from tests.keras.launches import on_ranks


@on_ranks("inside_xla", slow=("tensorflow",))
def test_collectives_inside_xla_are_rejected_and_fit_continues_without_xla(seen):
    first, second = seen
    for found in (first, second):
        for text in (found["rejected"], found["nested"]):
            assert "InsideXla: " in text and "outside it" in text, text
        assert found["found"] == pytest.approx([-0.15] * 5)
        assert len(found["said"]) == 1 and "Adversarial.train_step" in found["said"][0]
    assert first["weights"] == second["weights"]
