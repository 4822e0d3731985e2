"""Messages between two ranks that are threads of one process. See tests/core/collectives/test_messages.py, too."""

import threading

import pytest
import torch

from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from ring_plugins.core.collectives.messages import MessageGroup, Messenger
from ring_plugins.torch.point_to_point import PointToPoint


@pytest.fixture
def pair():
    messengers = [Messenger(rank, b"a secret", range(2)) for rank in range(2)]
    addresses = {rank: messenger.address for rank, messenger in enumerate(messengers)}
    groups = [MessageGroup(messenger, 1, "group", range(2), addresses) for messenger in messengers]
    both = [PointToPoint(rank, 2, groups[rank], None) for rank in range(2)]
    yield both
    for end, messenger in zip(both, messengers, strict=True):
        end.close()
        messenger.close()


def test_both_ranks_may_send_before_they_receive(pair):
    sends = [pair[rank].send(torch.full((3,), float(rank)), 1 - rank, tag=0) for rank in range(2)]
    found = [torch.zeros(3), torch.zeros(3)]
    receives = [pair[rank].receive(found[rank], 1 - rank, tag=0) for rank in range(2)]
    assert all(work.wait() for work in sends + receives)
    assert [tensor.tolist() for tensor in found] == [[1.0] * 3, [0.0] * 3]


def test_messages_of_a_tag_keep_their_order_and_tags_do_not_mix(pair):
    for number in range(5):
        pair[0].send(torch.tensor([number]), 1, tag=1)
    pair[0].send(torch.tensor([100]), 1, tag=2)
    other, found = torch.zeros(1, dtype=torch.int64), [torch.zeros(1, dtype=torch.int64) for _ in range(5)]
    pair[1].receive(other, 0, tag=2).wait()
    for tensor in found:
        pair[1].receive(tensor, 0, tag=1).wait()
    assert (other.item(), [tensor.item() for tensor in found]) == (100, [0, 1, 2, 3, 4])


def test_a_tensor_with_gaps_is_filled_and_a_future_tells_when(pair):
    wide = torch.zeros(4, 2)
    work = pair[1].receive(wide[:, 1], None, tag=0)
    future = work.get_future()
    pair[0].send(torch.arange(4.0), 1, tag=0).wait()
    assert future.wait()[0].tolist() == [0, 1, 2, 3]
    assert wide.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert work.source_rank() == 0


def test_another_size_is_rejected(pair):
    pair[0].send(torch.zeros(3), 1, tag=0)
    with pytest.raises(MismatchError, match="12 bytes of float32"):
        pair[1].receive(torch.zeros(2), 0, tag=0).wait()


@pytest.mark.parametrize("length", [3, 1 << 20])  # sent at once; offered
@pytest.mark.parametrize("rejecting", ["send", "receive"])
def test_what_one_end_rejects_reaches_the_other(pair, rejecting, length):
    dense, sparse = torch.zeros(length), torch.zeros(length).to_sparse()
    for waits_first in (True, False):
        reject, wait = (pair[0].send, pair[1].receive) if rejecting == "send" else (pair[1].receive, pair[0].send)
        to, source = (1, 0) if rejecting == "send" else (0, 1)
        work = wait(dense, source, 7) if waits_first else None
        with pytest.raises(ArgumentError, match="sparse"):
            reject(sparse, to, 7)
        work = work or wait(dense, source, 7)
        if rejecting == "receive" and length == 3:
            work.wait()  # a small message needs no receiver
        else:
            with pytest.raises(MismatchError, match=r"rejected the arguments of its end of group, 0 to 1, tag 7"):
                work.wait()
    received = torch.zeros(2)
    sends = pair[0].send(torch.ones(2), 1, 7)
    pair[1].receive(received, 0, 7).wait()  # and what comes after that is matched with it
    assert sends.wait() and received.tolist() == [1, 1]


def test_what_both_ends_reject_is_told_to_neither(pair):
    for end, start in ((0, pair[0].send), (1, pair[1].receive)):
        with pytest.raises(ArgumentError, match="sparse"):
            start(torch.zeros(2).to_sparse(), 1 - end, 0)
    received = torch.zeros(2)
    pair[0].send(torch.ones(2), 1, 0).wait()
    pair[1].receive(received, 0, 0).wait()
    assert received.tolist() == [1, 1]


@pytest.mark.parametrize(("peer", "whom"), [(0, "itself"), (2, "rank 2 of a group of 2")])
def test_wrong_peers_are_rejected(pair, peer, whom):
    with pytest.raises(ArgumentError, match=f"rank 0 cannot receive from {whom}"):
        pair[0].receive(torch.zeros(1), peer, tag=0)


def test_a_rank_alone_has_nobody_to_receive_from():
    with pytest.raises(ArgumentError, match="the only rank of its group"):
        PointToPoint(0, 1, None, None).receive(torch.zeros(1), None, tag=0)


def test_after_closing_nothing_is_sent(pair):
    pair[0].close()
    with pytest.raises(RingError, match="has been closed"):
        pair[0].send(torch.zeros(1), 1, tag=7)


def test_the_thread_of_a_channel_between_gpus_is_on_its_ranks_gpu(gpu):
    moved = []

    def connect(channel, index, cancelled):
        moved.append((tuple(channel), index, list(gpu.nccl.current_devices)))
        return gpu.communicator

    messages = PointToPoint(0, 2, None, connect)
    with pytest.raises(ArgumentError, match="receiver=1"):  # the communicator of this test has one rank
        messages.send(torch.zeros(1), 1, tag=0).wait()
    with pytest.raises(ArgumentError, match="NCCL cannot receive from any rank"):
        messages.receive(torch.zeros(1), None, tag=0)
    messages.close()
    assert moved == [((0, 1, 0), 0, [0])]
    assert not any("messages-(0, 1, 0" in thread.name for thread in threading.enumerate())
    with pytest.raises(RingError, match="has been closed"):
        messages.send(torch.zeros(1), 1, tag=0)
