"""The service of the monitor thread that looks after GPUs, on fakes."""

import time
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import PeerFailed, PeerLeft
from ring_plugins.core.control.wait import LongWait, long_waits
from ring_plugins.core.gpu.watchdog import GpuWatchdog


class Queue:
    def __init__(self, stream, queued_at):
        self.stream, self.oldest = stream, SimpleNamespace(queued_at=queued_at)

    def long_wait(self, peers):
        return LongWait(f"queued at {self.oldest.queued_at}", "", 0, "", (), 0.0, 0.0)


class Executor:
    def __init__(self, stream, queued_at):
        self.peers, self.queue, self.calls = [1, 2], Queue(stream, queued_at), []
        self.name, self.statistics = "gradients", SimpleNamespace(operations=4)
        self.connection = SimpleNamespace(queuing=(0.0, ""))

    def poll(self, departed):
        self.calls.append(("poll", departed))

    def abort(self, error):
        self.calls.append(("abort", error))


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


def test_executors_are_polled_with_the_ranks_that_have_left(published):
    executor = Executor(5, 0.0)
    GpuWatchdog(Detector(), lambda: [executor]).tick(0.0)
    assert executor.calls == [("poll", [2])]


def test_executors_are_aborted_when_a_rank_fails(published):
    executor, detector = Executor(5, 0.0), Detector()
    detector.error = PeerFailed("rank 1 died", 1)
    GpuWatchdog(detector, lambda: [executor]).tick(0.0)
    assert executor.calls == [("abort", detector.error)]


def test_the_first_operation_of_each_stream_is_published(published):
    executors = [Executor(5, 3.0), Executor(5, 2.0), Executor(6, 4.0)]
    watchdog = GpuWatchdog(Detector(), lambda: executors)
    watchdog.tick(0.0)
    assert {key: wait.communicator for key, wait in published.items()} == {
        ("stream", 5): "queued at 2.0",
        ("stream", 6): "queued at 4.0",
    }
    del executors[2]
    watchdog.tick(0.0)
    assert list(published) == [("stream", 5)]
    watchdog.close()
    assert published == {}


def test_a_thread_that_waits_inside_nccl_for_a_rank_that_has_left_ends_the_process(published):
    executor = Executor(5, 0.0)
    executor.queue.oldest = None
    watchdog = GpuWatchdog(Detector(), lambda: [executor])
    since = time.monotonic() - 5
    executor.connection.queuing = since, "all_reduce"
    watchdog.tick(since + 5)
    assert [(wait.what, wait.missing, wait.number) for wait in published.values()] == [
        ("gradients: all_reduce by NCCL", (1, 2), 4)
    ]
    with pytest.raises(PeerLeft, match=r"rank 2 has left the job, but a thread of this rank is inside NCCL .*all_red"):
        watchdog.tick(since + 11)
