"""A job whose ranks never communicate is named once."""

import sys
import time

import pytest

from ring_plugins.core.observe.unused import UnusedWatch


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    return []


def test_it_is_named_at_the_end_or_after_ten_minutes_and_once(said):
    watch = UnusedWatch(3, lambda: False, lambda: False, said.append)
    watch.tick(time.monotonic())
    assert said == []
    watch.tick(time.monotonic() + 601)
    watch.close()
    assert len(said) == 1 and said[0].startswith("the 3 ranks of this job have not communicated in their first 10 min")
    UnusedWatch(3, lambda: False, lambda: False, said.append).close()
    assert len(said) == 2 and said[1].startswith("the 3 ranks of this job have ended without communicating")


def test_jobs_that_communicate_fail_or_do_not_train_are_left_alone(said, monkeypatch):
    UnusedWatch(2, lambda: True, lambda: False, said.append).close()
    UnusedWatch(2, lambda: False, lambda: True, said.append).close()
    monkeypatch.setattr("ring_plugins.core.observe.unused._FRAMEWORKS", ("no such framework",))
    UnusedWatch(2, lambda: False, lambda: False, said.append).close()
    assert said == []
