"""How the members of a process group connect; the world is a fake that runs the exchange it is given."""

import concurrent.futures
from datetime import timedelta

import pytest
import torch.distributed as dist

from ring_plugins.core.base.errors import PeerFailed, RingError, SharedMemoryError
from ring_plugins.core.control import wait
from ring_plugins.torch import backend
from ring_plugins.torch.backend import _Connections
from ring_plugins.torch.point_to_point import Ends
from ring_plugins.torch.store import GroupStore


class World:
    """Stands for the world of one rank; a group of two is what `gather` returned, twice."""

    failure_detector = None

    def __init__(self, mine=True):
        self.is_mine = lambda: mine

    def new_communicator(self, name, ranks, gather, check_gather, executor=None):
        return name, ranks, gather("first"), gather("second")

    def new_device_communicator(self, name, index, streams, ranks, gather, own_stream):
        return name, index, streams, ranks, gather("first"), own_stream


def connections(store, rank, ranks=(4, 7, 9), world=None):
    members = GroupStore(store, rank, len(ranks), b"of the group")
    return _Connections(world or World(), members, "default", ranks)


def connected(store, ends, index=None):
    """What both ends of a channel make, each on its executor's thread."""

    def connect(rank):
        side = connections(store, rank)
        executor = side.executor(ends)
        try:
            return executor.start("message", lambda: side.connect(ends, index, executor)).wait()
        finally:
            executor.close()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(connect, (ends.sender, ends.receiver)))


def test_each_communicator_bootstraps_under_its_own_keys():
    store, ranks = dist.HashStore(), (4, 7, 9)
    members = [connections(store, rank) for rank in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        made = list(pool.map(_Connections.for_host, members))
    assert made == [("process group default", ranks, ["first"] * 3, ["second"] * 3)] * 3


def test_the_ends_of_a_channel_connect_as_sender_and_receiver(monkeypatch):
    monkeypatch.setattr(backend, "streams", lambda index: f"streams of {index}")
    store = dist.HashStore()
    name = "process group default, 2 to 0"
    assert connected(store, Ends(2, 0)) == [(name, (9, 4), ["first"] * 2, ["second"] * 2)] * 2
    made = connected(store, Ends(2, 0, 5), 1)
    assert made == [(f"{name}, tag 5, between GPUs", 1, "streams of 1", (9, 4), ["first"] * 2, True)] * 2


def test_an_end_that_cannot_connect_tells_the_other_one(monkeypatch):
    def fail(*_):
        raise SharedMemoryError("no room")

    store, ends = dist.HashStore(), Ends(2, 0)
    monkeypatch.setattr(World, "new_communicator", fail)
    with pytest.raises(SharedMemoryError, match="no room"):
        connected(store, ends)
    monkeypatch.undo()
    with pytest.raises(PeerFailed, match="default, 2 to 0: rank . could not construct it: SharedMemoryError: no room"):
        connected(store, ends)


class DyingStore:
    """A store whose rank dies once this one has told where it is."""

    timeout = timedelta(seconds=60)

    def __init__(self, name, store):
        pass

    def set(self, key, value):
        pass

    def check(self, keys):
        raise dist.DistNetworkError("connection reset")


def test_a_store_that_is_gone_is_blamed_on_a_rank(monkeypatch):
    side = connections(dist.HashStore(), 0)
    monkeypatch.setattr(backend, "PrefixStore", DyingStore)
    monkeypatch.setattr(GroupStore, "check", lambda self: None)
    monkeypatch.setattr(wait, "REASON", 0.0)
    executor = side.executor(Ends(0, 1))
    with pytest.raises(PeerFailed, match="0 to 1: cannot reach the store of torch.distributed: connection reset"):
        executor.start("send", lambda: side.connect(Ends(0, 1), None, executor)).wait()
    executor.close()


def test_a_forked_process_sends_nothing():
    with pytest.raises(RingError, match="forked from a rank"):
        connections(dist.HashStore(), 0, world=World(mine=False)).executor(Ends(0, 1))
