"""Whether a metric's state is a sum is found out on made-up data, which leaves the metric as it is."""

import keras
import numpy as np
import pytest

from ring_plugins.keras.metric_trials import Trial


class MovingAverage(keras.metrics.Metric):
    """What a batch adds depends on the state: no sum."""

    def __init__(self):
        super().__init__(name="moving")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, value, *_, **__):
        self.value.assign(0.9 * self.value + 0.1 * keras.ops.mean(value))

    def result(self):
        return self.value


def tried(metric, *batch):
    trial = Trial(metric)
    trial.watch()
    metric.update_state(*batch)
    before = [keras.ops.convert_to_numpy(variable).copy() for variable in metric.variables]
    trial.begin(True)
    found = trial.shows_sum()
    after = [keras.ops.convert_to_numpy(variable) for variable in metric.variables]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert "update_state" not in vars(metric)  # its own method again
    return found


@pytest.mark.parametrize(
    ("make", "batch", "expected"),
    [
        (keras.metrics.Mean, (np.ones(4, "float32"),), True),
        (keras.metrics.MeanSquaredError, (np.ones((4, 1), "float32"), np.zeros((4, 1), "float32")), True),
        (MovingAverage, (np.ones(4, "float32"),), False),
    ],
    ids=["a mean", "an error", "a moving average"],
)
def test_sums_are_told_from_other_states_and_nothing_is_changed(make, batch, expected):
    assert tried(make(), *batch) is expected


def test_a_metric_that_was_never_updated_shows_nothing():
    metric = keras.metrics.Mean()
    trial = Trial(metric)
    assert not trial.shows_sum() and trial.begin(True) == []
