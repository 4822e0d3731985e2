"""How the members of a process group connect; the world is a fake that runs the exchange it is given."""

import concurrent.futures

import torch.distributed as dist

from ring_plugins.torch.backend import _Connections
from ring_plugins.torch.point_to_point import Channel


class World:
    def new_communicator(self, name, ranks, gather):
        return name, ranks, gather("first"), gather("second")


def test_each_communicator_bootstraps_under_its_own_keys():
    store, ranks = dist.HashStore(), (4, 7, 9)
    members = [_Connections(World(), store, "default", rank, ranks) for rank in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        made = list(pool.map(_Connections.for_host, members))
    assert made == [("process group default", ranks, ["first"] * 3, ["second"] * 3)] * 3


def test_the_ends_of_a_channel_connect_as_sender_and_receiver():
    store, ranks = dist.HashStore(), (4, 7, 9)
    channel = Channel(sender=2, receiver=0, tag=5, between_gpus=False)
    ends = [_Connections(World(), store, "default", rank, ranks) for rank in (2, 0)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda end: end.for_channel(channel, None, lambda: False), ends))
    assert made == [("process group default, 2 to 0, tag 5", (9, 4), ["first"] * 2, ["second"] * 2)] * 2
