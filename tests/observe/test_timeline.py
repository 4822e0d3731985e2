"""Timeline in a script; what it records is tested in tests/core/observe/test_timeline.py."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from ring_plugins.observe import timeline as observed
from ring_plugins.observe.timeline import Timeline


def test_a_timeline_without_a_job_does_nothing(tmp_path):
    timeline = Timeline(tmp_path / "traces")
    with timeline:
        pass
    assert timeline.stop() is None
    assert os.listdir(tmp_path) == []


class Observers(NamedTuple):
    timeline: Any


def test_a_timeline_that_does_not_record_ends_no_recording(monkeypatch):
    calls = []

    class Aggregator:
        is_complete = True

        def start(self, directory):
            calls.append("start")

        def stop(self):
            calls.append("stop")

        def finish(self):
            return Path("timeline.json")

    monkeypatch.setattr(observed, "current_observers", lambda: Observers(Aggregator()))
    monkeypatch.setattr(observed, "_PATIENCE", 0.0)  # nothing records
    timeline = Timeline("traces")
    assert timeline.stop() is None and calls == []  # as on_train_end of a callback whose batches never came
    timeline.start()
    assert timeline.stop() == Path("timeline.json")
    assert timeline.stop() is None
    assert calls == ["start", "stop"]
