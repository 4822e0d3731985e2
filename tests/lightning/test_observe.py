"""The callbacks, with a Trainer that has only the attributes they read."""

from types import SimpleNamespace

import pytest

from ring_plugins.lightning import BalanceMonitor, TimelineCallback
from ring_plugins.observe import balance_monitor, timeline


class Recorder:
    calls: list

    def __init__(self, *arguments):
        Recorder.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name)


class Figures(Recorder):
    def figures(self):
        return {"ring/waiting_ms": 1.0}


@pytest.fixture
def trainer():
    logged = []
    log_metrics = lambda figures, step: logged.append((step, figures))  # noqa: E731
    logger = SimpleNamespace(log_metrics=log_metrics)
    return SimpleNamespace(global_step=0, log_every_n_steps=2, loggers=[logger], logged=logged)


def test_figures_are_logged_every_n_steps(monkeypatch, trainer):
    monkeypatch.setattr(balance_monitor, "BalanceMonitor", Figures)
    monitor = BalanceMonitor()
    monitor.on_train_start(trainer, None)
    for trainer.global_step in range(5):
        monitor.on_train_batch_end(trainer, None, None, None, 0)
    monitor.on_train_end(trainer, None)
    assert trainer.logged == [(2, {"ring/waiting_ms": 1.0}), (4, {"ring/waiting_ms": 1.0})]
    assert Figures.calls == ["start", "finish"]


def test_a_timeline_records_the_batches_that_were_asked_for(monkeypatch, trainer):
    monkeypatch.setattr(timeline, "Timeline", Recorder)
    callback = TimelineCallback("somewhere", first_batch=1, batches=2)
    seen = []
    for batch in range(4):
        callback.on_train_batch_start(trainer, None, None, batch)
        callback.on_train_batch_end(trainer, None, None, None, batch)
        seen.append(list(Recorder.calls))
    assert seen == [[], ["start"], ["start", "stop"], ["start", "stop"]]
