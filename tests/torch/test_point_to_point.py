"""Messages between two ranks that are threads of one process, over a fake communicator."""

import queue
import threading

import pytest
import torch

from ring_plugins.core.base.errors import ArgumentError, PeerFailed
from ring_plugins.torch.point_to_point import PointToPoint


class Wire:
    """Stands for the communicators of all channels: what the sender's rank broadcasts, the receiver's gets."""

    def __init__(self):
        self.channels, self.connected, self.closed, self.failing = {}, [], [], False

    def connector(self, rank):
        def connect(channel, index, cancelled):
            assert index is None
            self.connected.append(channel)
            return End(self.channels.setdefault(channel, queue.Queue()), channel.sender == rank, self)

        return connect


class End:
    def __init__(self, messages, sends, wire):
        self.messages, self.sends, self.wire = messages, sends, wire

    def broadcast(self, memory, root):
        if self.wire.failing:
            raise PeerFailed("rank 1 failed", 1)
        if self.sends:
            self.messages.put(memory.array.copy())
        else:
            memory.array[:] = self.messages.get(timeout=10)

    def close(self):
        self.wire.closed.append(self)


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def pair(wire):
    both = [PointToPoint(rank, 2, wire.connector(rank)) for rank in range(2)]
    yield both
    for end in both:
        end.close()


def test_both_ranks_may_send_before_they_receive(pair):
    sends = [pair[rank].send(torch.full((3,), float(rank)), 1 - rank, tag=0) for rank in range(2)]
    found = [torch.zeros(3), torch.zeros(3)]
    receives = [pair[rank].receive(found[rank], 1 - rank, tag=0) for rank in range(2)]
    assert all(work.wait() for work in sends + receives)
    assert [tensor.tolist() for tensor in found] == [[1.0] * 3, [0.0] * 3]


def test_messages_of_a_tag_keep_their_order_and_tags_do_not_mix(pair, wire):
    for number in range(5):
        pair[0].send(torch.tensor([number]), 1, tag=1)
    pair[0].send(torch.tensor([100]), 1, tag=2)
    other, found = torch.zeros(1, dtype=torch.int64), [torch.zeros(1, dtype=torch.int64) for _ in range(5)]
    pair[1].receive(other, 0, tag=2).wait()
    for tensor in found:
        pair[1].receive(tensor, 0, tag=1).wait()
    assert (other.item(), [tensor.item() for tensor in found]) == (100, [0, 1, 2, 3, 4])
    assert len(wire.connected) == 4  # each end of each tag connected once


def test_after_a_failure_every_message_of_the_channel_fails(pair, wire):
    wire.failing = True
    works = [pair[0].send(torch.zeros(1), 1, tag=0) for _ in range(2)]
    for work in works:
        with pytest.raises(PeerFailed):
            work.wait()
    assert len(wire.connected) == 1


@pytest.mark.parametrize(("peer", "whom"), [(0, "itself"), (2, "rank 2 of a group of 2")])
def test_wrong_peers_are_refused(pair, peer, whom):
    with pytest.raises(ArgumentError, match=f"rank 0 cannot receive from {whom}"):
        pair[0].receive(torch.zeros(1), peer, tag=0)


def test_closing_ends_the_threads_and_the_communicators(wire):
    sender = PointToPoint(0, 2, wire.connector(0))
    sender.send(torch.zeros(1), 1, tag=7).wait()
    sender.close()
    names = [thread.name for thread in threading.enumerate()]
    assert len(wire.closed) == 1
    assert not any("messages-(0, 1, 7" in name for name in names)


def test_the_thread_of_a_channel_between_gpus_is_on_its_ranks_gpu(gpu):
    moved = []

    def connect(channel, index, cancelled):
        moved.append((channel.between_gpus, index, list(gpu.nccl.current_devices)))
        return gpu.communicator

    messages = PointToPoint(0, 2, connect)
    with pytest.raises(ArgumentError, match="receiver=1"):  # the communicator of this test has one rank
        messages.send(torch.zeros(1), 1, tag=0).wait()
    messages.close()
    assert moved == [(True, 0, [0])]
