"""Spans are kept only while somebody wants them, and not without limit."""

from ring_plugins.core.trace.recorder import Recorder


def test_a_full_recorder_drops_the_oldest_spans(monkeypatch):
    monkeypatch.setattr("ring_plugins.core.trace.recorder._LIMIT", 3)
    recorder = Recorder()
    recorder.record("step", "off", 0, 1)
    recorder.on = True
    for i in range(5):
        recorder.record("step", str(i), i, i + 1, more=i)
    assert recorder.lost == 2
    assert [(span.name, span.arguments) for span in recorder.take()] == [(str(i), {"more": i}) for i in (2, 3, 4)]
    assert recorder.take() == []
