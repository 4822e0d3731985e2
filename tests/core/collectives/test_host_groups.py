"""The groups of a communicator follow its members: what stays where it is, and what all count from."""

import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.collectives.host_groups import VIEW_SHIFT, HostGroups, Member
from ring_plugins.core.collectives.shm_barrier import _EPOCH
from ring_plugins.core.control.wait import Wait
from tests.core.collectives.mortal_ranks import on_mortal_ranks

COUNT = 100_000


class Owner:
    layout = "made", "so"


def groups(own, *hosts):
    members = [Member(rank, node=host) for rank, host in enumerate(hosts)]
    return HostGroups("test", own, members, 6, Wait("test", None), None, None, None)


def test_hosts_are_told_apart():
    one = groups(1, "a", "a", "b")
    assert (one.ranks, one.rank, one.is_on_one_host) == ((0, 1, 2), 1, False)
    assert groups(0, "a", "a").is_on_one_host


def test_buffers_without_an_owner_cannot_be_made_anew():
    one, owner = groups(0, "a"), Owner()
    assert one.layout == ("", "") and one.own_buffers == []
    one.buffers_belong_to(owner)
    assert one.layout == ("made", "so")
    del owner
    assert one.layout == ("", "")


def test_closed_groups_take_any_call():
    one = groups(0, "a")
    one.close()
    assert one.node is None and one.bytes.barrier is None


def test_after_a_loss_memory_stays_where_it_is_and_barriers_count_on_from_the_same_number(monkeypatch):
    def run(rank):
        communicator = rank.communicator("one")
        buffer = communicator.allocate(4 * COUNT)
        mapped = HostMemory(buffer.array.view(np.float32), "float32")
        mapped.array[:] = rank.rank + 1
        before = rank.barriers
        if rank.rank == 1:
            rank.dies = lambda at: "before" if at == before + 1 else None
        communicator.barrier()
        found, node = communicator.groups, communicator.groups.node
        epoch = node.barriers._own[_EPOCH] >> VIEW_SHIFT
        communicator.all_reduce(mapped, Op.SUM)
        assert node.mapped(mapped.array) is not None
        values = set(buffer.array.view(np.float32).tolist())
        return found.ranks, found.rank, communicator.rank, communicator.size, epoch, values

    first, died, second = on_mortal_ranks(monkeypatch, 3, run)
    assert died is None
    assert first == ((0, 2), 0, 0, 2, 1, {4.0}) and second == ((0, 2), 1, 1, 2, 1, {4.0})
