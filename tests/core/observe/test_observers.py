"""What observes a job: every rank reports, and rank 0 collects besides."""

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.observe.observers import Observers
from ring_plugins.core.trace.recorder import recorder
from tests.core.observe.fakes import FakeChannel


class Detector:
    def __init__(self, rank):
        self.members = Members(rank, [Member(one, one, "host", one) for one in range(2)])


@pytest.fixture
def observers(request):
    yield lambda rank, **options: Observers(FakeChannel(rank), Detector(rank), list, **options)
    recorder.on = False


def test_rank_0_collects_what_all_ranks_report(observers):
    first, other = observers(0), observers(1)
    assert (other.timeline, other.all_steps, other.all_stalls) == (None, None, None)
    assert other.services[:3] == [other.stalls, other.steps, other.spans]
    assert first.services == [*(first.stalls, first.steps, first.spans), *first.services[3:]]
    assert set(first.services[5:]) == {first.timeline, first.all_steps, first.all_stalls}
    assert first.members.own == 0 and not recorder.on


def test_the_launchers_job_shows_the_ranks_of_its_parts(observers):
    part, alone = observers(0, is_part=True), observers(0)
    assert part.live not in part.services and alone.live in alone.services


def test_a_rank_records_at_once_and_rank_0_opens_the_timeline(observers, tmp_path, monkeypatch):
    monkeypatch.setenv("RING_TIMELINE", str(tmp_path))
    observers(1, records=True)
    assert recorder.on
    first = observers(0, records=True)
    assert (tmp_path / "timeline.json").exists()
    first.timeline.finish()


def test_an_invalid_setting_is_named(observers, monkeypatch):
    monkeypatch.setenv("RING_STALL_WARNING", "soon")
    with pytest.raises(ArgumentError, match="RING_STALL_WARNING"):
        observers(0)
