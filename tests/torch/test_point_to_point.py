"""Messages between two ranks that are threads of one process; checks_process_group.py has those between processes."""

import contextlib
import signal
import threading
import time

import pytest
import torch

from ring_plugins.core.base.errors import ArgumentError, MismatchError, PeerFailed, RingError
from ring_plugins.core.base.facts import Facts
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.pair_executor import PairExecutor
from ring_plugins.core.control.wait import Wait
from ring_plugins.torch import point_to_point
from ring_plugins.torch.point_to_point import PointToPoint


class Detector:
    """Stands for the failure detectors of all ranks: tells the members of a communicator that one has broken it."""

    mesh, aborted, rank = None, False, 0

    def __init__(self):
        self.states, self.rejections, self.mesh, self.facts = {}, {}, None, Facts()

    def watch(self, key, state):
        self.states.setdefault(key, []).append(state)

    def break_communicator(self, key, text, members):
        for state in self.states[key]:
            state.fail(PeerFailed(text, 0))

    def reject(self, key, number, before, text):
        self.rejections[key, number, before] = text

    def rejection(self, key, number, before, others):
        return self.rejections.get((key, number, before), "")

    def check(self, communicator, missing, what):
        pass


class Pair:
    """Connects the channels of two ranks, which meet in a table instead of a store."""

    def __init__(self):
        self.offers, self.detector = {}, Detector()
        self.ends = [PointToPoint(rank, 2, Side(self, rank)) for rank in range(2)]

    def close(self):
        for end in self.ends:
            end.close()


class Side:
    """What one rank's `PointToPoint` is given."""

    def __init__(self, pair, rank):
        self.pair, self.rank = pair, rank

    def executor(self, ends):
        name = f"group, {ends.sender} to {ends.receiver}"
        return PairExecutor(name, Wait(name, self.pair.detector), callers_run=True)

    def connect(self, ends, index, executor):
        def gather(item):
            position = int(self.rank == ends.receiver)
            offers = self.pair.offers.setdefault(ends, {})
            offers[position] = item
            executor.meet(lambda: len(offers) == 2, lambda: [1 - self.rank], time.sleep)
            return [offers[0], offers[1]]

        name, tag = f"group, {ends.sender} to {ends.receiver}", 2 * ends.sender + 2
        detector = self.pair.detector
        return HostCommunicator(name, self.rank, "host", tag, gather, detector, None, executor=executor)


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(point_to_point, "_FINISH", 0.5)
    both = Pair()
    yield both.ends
    both.close()


@pytest.mark.parametrize("count", [0, 3, 3_000_000])
def test_both_ranks_may_start_to_send_before_they_receive(pair, count):
    sends = [pair[rank].send(torch.full((count,), float(rank)), 1 - rank, tag=0) for rank in range(2)]
    found = [torch.zeros(count), torch.zeros(count)]
    receives = [pair[rank].receive(found[rank], 1 - rank, tag=0) for rank in range(2)]
    assert all(work.wait() for work in sends + receives)
    assert [tensor.sum().item() for tensor in found] == [count, 0]
    assert [work.source_rank() for work in sends + receives] == [-1, -1, 1, 0]


def test_messages_arrive_in_order_and_work_may_be_waited_for_in_any_order(pair):
    sends = [pair[0].send(torch.tensor([number]), 1, tag=number) for number in range(5)]
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(5)]
    receives = [pair[1].receive(tensor, 0, tag=number) for number, tensor in enumerate(found)]
    for work in [*reversed(receives), *reversed(sends)]:
        work.wait()
    assert [tensor.item() for tensor in found] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2, torch.int16])
def test_every_type_arrives_as_it_was_also_in_tensors_with_gaps(pair, dtype):
    values = torch.randint(-128, 128, (4, 2, 8), dtype=torch.int8).bool() if dtype is torch.bool else None
    if values is None:
        values = torch.randint(-128, 128, (4, 2, 8), dtype=torch.int8).view(dtype)
    wide = torch.zeros_like(values)
    work = pair[1].receive(wide[:, 1], 0, tag=0)
    future = work.get_future()
    pair[0].send(values[:, 1], 1, tag=0).wait()
    assert future.wait()[0].shape == wide[:, 1].shape
    assert wide[:, 1].contiguous().view(torch.uint8).tolist() == values[:, 1].contiguous().view(torch.uint8).tolist()
    assert not wide[:, 0].contiguous().view(torch.uint8).any()


@pytest.mark.parametrize(
    ("length", "dtype", "tag", "remedy"),
    [
        (2, torch.float32, 7, "Usually a size depends on the rank"),
        (3, torch.int32, 7, "Pass the same dtype on all ranks"),
        (3, torch.float32, 8, "arrive in the order in which they were sent, whatever their tags"),
    ],
)
def test_another_size_type_or_tag_is_an_error_at_both_ends_that_names_both(pair, length, dtype, tag, remedy):
    sending = pair[0].send(torch.zeros(3), 1, tag=7)
    receiving = pair[1].receive(torch.zeros(length, dtype=dtype), 0, tag=tag)
    theirs = f"{length} x {str(dtype).removeprefix('torch.')}, tag {tag}"
    for work in (sending, receiving):
        with pytest.raises(MismatchError) as caught:
            work.wait()
        assert "ranks disagree in group, 0 to 1: rank 0 calls send/recv(3 x float32, tag 7)" in str(caught.value)
        assert f"rank 1 calls send/recv({theirs})" in str(caught.value) and remedy in str(caught.value)
    with pytest.raises(MismatchError):
        pair[0].send(torch.zeros(3), 1, tag=7).wait()  # nothing follows on this channel
    back = pair[1].send(torch.ones(1), 0, tag=0), pair[0].receive(torch.zeros(1), 1, tag=0)  # but on the other
    assert all(work.wait() for work in back)


@pytest.mark.parametrize("waits_first", [True, False])
@pytest.mark.parametrize("rejecting", ["send", "receive"])
def test_what_one_end_rejects_reaches_the_other(pair, rejecting, waits_first):
    reject, wait = (pair[0].send, pair[1].receive) if rejecting == "send" else (pair[1].receive, pair[0].send)
    to, source = (1, 0) if rejecting == "send" else (0, 1)
    work = wait(torch.zeros(3), source, 7) if waits_first else None
    with pytest.raises(ArgumentError, match="sparse"):
        reject(torch.zeros(3).to_sparse(), to, 7)
    with pytest.raises(
        MismatchError, match=rf"rejected the arguments of {rejecting} (to|from) rank {to}, tag 7: .*sparse"
    ):
        (work or wait(torch.zeros(3), source, 7)).wait()


@pytest.mark.parametrize(("peer", "whom"), [(0, "itself"), (2, "rank 2 of a group of 2"), (-1, "rank -1 of a group")])
def test_wrong_peers_are_rejected(pair, peer, whom):
    with pytest.raises(ArgumentError, match=f"rank 0 cannot receive from {whom}"):
        pair[0].receive(torch.zeros(1), peer, tag=0)


def test_closing_finishes_what_both_ends_have_started_and_drops_the_rest(pair):
    found = torch.zeros(3_000_000)
    works = pair[0].send(torch.ones(3_000_000), 1, tag=0), pair[1].receive(found, 0, tag=0)
    alone = pair[1].send(torch.ones(1), 0, tag=0)  # is not connected
    behind = pair[0].send(torch.ones(1), 1, tag=0)  # is
    pair[1].close()
    pair[0].close()
    assert all(work.wait() for work in works) and found.all()
    for work in (alone, behind):
        with pytest.raises(RingError, match="has been closed"):
            work.wait()
    with pytest.raises(RingError, match=r"the process group of send to rank 1, tag 7 has been closed"):
        pair[0].send(torch.zeros(1), 1, tag=7)
    assert not any("ring:group, " in thread.name for thread in threading.enumerate())


def interrupted(wait):
    def stop(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("busy", [True, False])  # whether the thread runs it, since another is before it
def test_an_interrupted_receive_leaves_the_tensor_alone_and_ends_the_channel_at_both_ends(pair, connected, busy):
    if connected:
        works = pair[0].send(torch.ones(1), 1, tag=0), pair[1].receive(torch.zeros(1), 0, tag=0)
        assert all(work.wait() for work in works)
    tensor = torch.zeros(3)
    works = [pair[1].receive(tensor, 0, 0) for _ in range(1 + busy)]
    interrupted(works[-1].wait)
    sending = pair[0].send(torch.ones(3), 1, 0)
    for work in works:
        with (
            contextlib.suppress(KeyboardInterrupt),
            pytest.raises(RingError, match="interrupted in .*KeyboardInterrupt"),
        ):
            work.wait()
    with pytest.raises(RingError, match="interrupted in .*KeyboardInterrupt"):
        pair[1].receive(tensor, 0, 0).wait()
    if connected:
        with pytest.raises(PeerFailed, match="rank 1 was interrupted"):
            sending.wait()
    assert tensor.sum() == 0


def test_a_message_between_gpus_is_moved_on_its_ranks_gpu(gpu, monkeypatch):
    moved, current = [], []
    monkeypatch.setattr("ring_plugins.torch.device.set_device", current.append)

    class Gpus:
        def executor(self, ends):
            return PairExecutor(f"{tuple(ends)}", Wait("a channel", None), callers_run=False)

        def connect(self, ends, index, executor):
            moved.append((tuple(ends), index, list(current)))
            return gpu.communicator

    messages = PointToPoint(0, 2, Gpus())
    with pytest.raises(ArgumentError, match="receiver=1"):  # the communicator of this test has one rank
        messages.send(torch.zeros(1), 1, tag=0).wait()
    messages.close()
    assert moved == [((0, 1, 0), 0, [0])]
    assert not any("(0, 1, 0)" in thread.name for thread in threading.enumerate())
    with pytest.raises(RingError, match="has been closed"):
        messages.send(torch.zeros(1), 1, tag=0)
