"""How the members of a process group connect; the world is a fake that runs the exchange it is given."""

import concurrent.futures

import torch.distributed as dist

from ring_plugins.core.net.message_stream import Address
from ring_plugins.torch import backend
from ring_plugins.torch.backend import _Connections
from ring_plugins.torch.point_to_point import Channel
from ring_plugins.torch.store import StoredFailure


class World:
    def __init__(self, rank=0):
        self.rank, self.known = rank, {}
        self.address = Address(f"socket of {rank}", [f"10.0.0.{rank}"], 80)

    def new_communicator(self, name, ranks, gather, check_gather):
        return name, ranks, gather("first"), gather("second")

    def new_device_communicator(self, name, index, streams, ranks, gather, own_stream):
        return name, index, streams, ranks, gather("first"), own_stream

    def messenger(self):
        return self

    def join(self, group, addresses):
        self.known.update(addresses)


def connections(world, store, group, rank, ranks, secret=b"of the group"):
    return _Connections(world, store, group, rank, ranks, secret, StoredFailure(store, secret, None))


def test_each_communicator_bootstraps_under_its_own_keys():
    store, ranks = dist.HashStore(), (4, 7, 9)
    members = [connections(World(), store, "default", rank, ranks) for rank in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        made = list(pool.map(_Connections.for_host, members))
    assert made == [("process group default", ranks, ["first"] * 3, ["second"] * 3)] * 3


def test_the_ends_of_a_channel_between_gpus_connect_as_sender_and_receiver(monkeypatch):
    monkeypatch.setattr(backend, "streams", lambda index: f"streams of {index}")
    store, ranks = dist.HashStore(), (4, 7, 9)
    channel = Channel(sender=2, receiver=0, tag=5)
    ends = [connections(World(), store, "default", rank, ranks) for rank in (2, 0)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda end: end.for_channel(channel, 1, lambda: False), ends))
    name = "process group default, 2 to 0, tag 5, between GPUs"
    assert made == [(name, 1, "streams of 1", (9, 4), ["first"] * 2, True)] * 2


def test_the_members_learn_where_the_others_accept_messages():
    store, ranks = dist.HashStore(), (4, 7, 9)
    members = [connections(World(rank), store, "default", i, ranks) for i, rank in enumerate(ranks)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(_Connections.for_messages, members))
    assert len({group.context for group in groups}) == 1
    assert [group.rank for group in groups] == [0, 1, 2]
    known = {rank: Address(f"socket of {rank}", [f"10.0.0.{rank}"], 80) for rank in ranks}
    assert all(member._world.known == known for member in members)
    assert connections(World(4), store, "alone", 0, (4,)).for_messages() is None
