"""Ranks compare what they train with, and say what differs."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from ring_plugins.core.base.errors import DriftError, MismatchError
from ring_plugins.keras import consistency
from ring_plugins.keras.consistency import check_end_of_fit, check_equal_learning_rates, check_equal_optimizers
from tests.core.collectives.thread_ranks import on_thread_ranks


def test_optimizers_with_other_options_are_rejected_by_name():
    def rate(rank):
        return keras.optimizers.schedules.ExponentialDecay(0.1, 10 + rank, 0.9)

    different = {
        r"learning_rate differs among ranks \(rank 0: 0.1\d*, rank 1: 0.2": lambda r: keras.optimizers.SGD(
            0.1 * (1 + r)
        ),
        "learning_rate.config.decay_steps": lambda r: keras.optimizers.SGD(rate(r)),
        r"class differs among ranks \(rank 0: SGD, rank 1: Adam\)": lambda r: getattr(
            keras.optimizers, ("SGD", "Adam")[r]
        )(),
        "inner_optimizer.config.momentum": lambda r: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, r / 2)
        ),
        "optimizers.0.learning_rate": lambda r: built(keras.optimizers.SGD(0.1 * (1 + r))),
    }

    def built(inner):
        several = keras.optimizers.MultiOptimizer(lambda variable: inner)
        several.build([keras.Variable([1.0])])
        return several

    def rank_of(rank, communicator):
        check_equal_optimizers(keras.optimizers.Adam(rate(0), name=f"adam_{rank}"), communicator)
        for text, make in different.items():
            with pytest.raises(MismatchError, match=text):
                check_equal_optimizers(make(rank), communicator)
        check_equal_optimizers(built(keras.optimizers.SGD(0.1)), communicator)
        with pytest.raises(MismatchError, match="learning rates differ among ranks"):
            check_equal_learning_rates(built(keras.optimizers.SGD(0.1 * (1 + rank))), communicator)

    on_thread_ranks(2, rank_of)


@pytest.mark.parametrize("which", ["weights", "decisions", "both", "neither"])
def test_what_callbacks_leave_behind_is_compared_when_fit_ends(monkeypatch, which):
    monkeypatch.setattr("ring_plugins.observe.consistency.is_check_wanted", lambda: True)
    monkeypatch.setattr(consistency, "is_check_wanted", lambda: True)
    optimizer = keras.optimizers.SGD(0.1)

    def rank_of(rank, communicator):
        stopping = keras.callbacks.EarlyStopping()
        vars(stopping).update(best_epoch=rank if which in ("decisions", "both") else 0, stopped_epoch=0)
        weight = np.full(3, rank if which in ("weights", "both") else 0, "float32")
        checksums = lambda: (["weight"], [consistency.checksum(weight)])  # noqa: E731
        try:
            return check_end_of_fit(SimpleNamespace(callbacks=[stopping]), checksums, [optimizer], communicator)
        except DriftError as error:
            return f"DriftError: {error}"

    first, second = on_thread_ranks(2, rank_of)
    assert first == second
    if which == "neither":
        assert first == ""
        return
    assert first.startswith("DriftError: when fit() ended the weights of rank") == (which != "decisions")
    decided = "decided differently" in first and "EarlyStopping.best_epoch (rank 0: 0, rank 1: 1)" in first
    assert decided == (which != "weights")
    assert "MetricAverageCallback" in first
