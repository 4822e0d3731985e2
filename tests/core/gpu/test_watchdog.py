"""The service of the monitor thread that looks after GPUs, on fakes."""

from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.control.wait import LongWait, long_waits
from ring_plugins.core.gpu.watchdog import GpuWatchdog


class Communicator:
    ranks = (0, 1, 2)

    def __init__(self, stream, queued_at):
        self.stream, self.calls = stream, []
        self.oldest = SimpleNamespace(queued_at=queued_at)

    def poll(self, departed):
        self.calls.append(("poll", departed))

    def abort(self, error):
        self.calls.append(("abort", error))

    def long_wait(self):
        return LongWait(f"queued at {self.oldest.queued_at}", "", 0, "", (), 0.0, 0.0)


class Detector:
    error = None

    def failure(self):
        return self.error

    def has_ended(self, rank):
        return rank == 2


@pytest.fixture
def published():
    before = dict(long_waits)
    long_waits.clear()
    yield long_waits
    long_waits.clear()
    long_waits.update(before)


def test_communicators_are_polled_with_the_ranks_that_have_left(published):
    communicator = Communicator(5, 0.0)
    GpuWatchdog(Detector(), lambda: [communicator]).tick(0.0)
    assert communicator.calls == [("poll", [2])]


def test_communicators_are_aborted_when_a_rank_fails(published):
    communicator, detector = Communicator(5, 0.0), Detector()
    detector.error = PeerFailed("rank 1 died", 1)
    GpuWatchdog(detector, lambda: [communicator]).tick(0.0)
    assert communicator.calls == [("abort", detector.error)]


def test_the_first_operation_of_each_stream_is_published(published):
    communicators = [Communicator(5, 3.0), Communicator(5, 2.0), Communicator(6, 4.0)]
    watchdog = GpuWatchdog(Detector(), lambda: communicators)
    watchdog.tick(0.0)
    assert {key: wait.communicator for key, wait in published.items()} == {
        ("stream", 5): "queued at 2.0",
        ("stream", 6): "queued at 4.0",
    }
    del communicators[2]
    watchdog.tick(0.0)
    assert list(published) == [("stream", 5)]
    watchdog.close()
    assert published == {}
