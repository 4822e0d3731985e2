"""Timeline in a script; what it records is tested in tests/core/observe/test_timeline.py."""

import os

from ring_plugins.observe.timeline import Timeline


def test_a_timeline_without_a_job_does_nothing(tmp_path):
    timeline = Timeline(tmp_path / "traces")
    with timeline:
        pass
    assert timeline.stop() is None
    assert os.listdir(tmp_path) == []
