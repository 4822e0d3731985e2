"""Horovod's callbacks take its arguments, and its rates, which scripts have multiplied by the size.

Keras is imported in the tests: at the top, it would import TensorFlow in each worker of `pytest -n`.
"""

import sys

import pytest

from ring_plugins.core.base.errors import ArgumentError


def test_arguments_are_those_of_horovod():
    from ring_plugins.horovod.keras import callbacks

    assert callbacks.BroadcastGlobalVariablesCallback(1, device="/cpu:0").root_rank == 1
    assert callbacks.MetricAverageCallback("/cpu:0", None).averaged == ()
    schedule = callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.5, 2, 4)
    assert (schedule.initial_learning_rate, schedule.start_epoch, schedule.end_epoch) == (0.4, 2, 4)
    with pytest.raises(ArgumentError, match=r"lambda epoch: 0\.5 for a rate .*lambda epoch: 0\.5 \*\* \(epoch - 3\)"):
        callbacks.LearningRateScheduleCallback(0.4, 0.5, 3)
    with pytest.raises(AttributeError, match=r"did you mean .*\.MetricAverageCallback\?"):
        callbacks.MetricsAverageCallback  # noqa: B018


def test_warm_up_begins_with_the_rate_for_one_process(monkeypatch):
    from ring_plugins.horovod.keras import callbacks

    monkeypatch.setattr(callbacks, "size", lambda: 4)
    warmup = callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, steps_per_epoch=4)
    assert warmup._multipliers() == (0.25, 1.0)
    assert [warmup._multiplier(step / 4) for step in range(8)] == pytest.approx(
        [0.25 + 0.75 * (step + 1) / 8 for step in range(8)]
    )
    assert warmup._multiplier(2.0) == 1.0


def test_remedies_name_the_callback_as_the_script_writes_it(monkeypatch):
    import ring_plugins.horovod.keras as hvd
    from ring_plugins.keras import consistency, running_fit

    for face, callback in ((hvd, "hvd.callbacks.BroadcastGlobalVariablesCallback(0)"), (None, "BroadcastCallback()")):
        monkeypatch.setattr(sys.modules["__main__"], "hvd", face, raising=False)
        remedies = running_fit._remedy(), consistency._other_starts()
        assert all(f"{callback} to fit(callbacks=...) on all ranks" in text for text in remedies)
