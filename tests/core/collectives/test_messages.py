"""Messages between ranks that are messengers of one process, over unix sockets and over TCP."""

import contextlib
import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest

from ring_plugins.core.base.errors import MismatchError, PeerFailed, PeerLeft, RingError, TimeoutExceeded
from ring_plugins.core.collectives import message_closing, message_watch
from ring_plugins.core.collectives.messages import MessageGroup, Messenger
from ring_plugins.core.net.message_stream import CREDIT_BYTES, EAGER_BYTES


class Detector:
    """Stands for the failure detector: knows what a test tells it."""

    def __init__(self):
        self.error, self.left, self.failed, self.aborted, self.asked = None, set(), False, False, []
        self.deadlocks, self.states, self.others = {}, weakref.WeakValueDictionary(), []

    def failure(self):
        return self.error

    def watch(self, key, state):
        self.states[key] = state

    def break_communicator(self, key, text, members):
        for other in self.others:
            if other is not self and key in other.states:
                other.states[key].fail(PeerFailed(text, 0))

    def lost(self):
        return frozenset()

    def check(self, name, missing, what):
        self.asked.append((name, tuple(missing)))
        if self.error is not None:
            raise self.error
        for rank in missing:
            if rank in self.left:
                raise PeerLeft(f"rank {rank} has left", rank)

    def has_left(self, rank):
        return rank in self.left


class End:
    """One rank's end of the messages."""

    def __init__(self, rank, size, over):
        near, addresses = (range(size), []) if over == "unix" else ((), ["127.0.0.1"])
        self.detector = Detector()
        self.messenger = Messenger(rank, b"a secret", near, addresses, self.detector)

    def join(self, ends, context=1):
        addresses = {end.messenger.rank: end.messenger.address for end in ends}
        self.group = MessageGroup(self.messenger, context, "group", sorted(addresses), addresses)
        return self

    def send(self, data, to, tag=0):
        return Pending(self.group, self.group.send, data, to, tag)

    def receive(self, data, source, tag=0):
        return Pending(self.group, self.group.receive, data, source, tag)


class Pending:
    def __init__(self, group, start, data, peer, tag):
        self.data, self.error, self.finished, self.group = data, None, threading.Event(), group
        self.message = start(data.reshape(-1).view(np.uint8), str(data.dtype), peer, tag, self._finish)

    def _finish(self, error):
        self.error = error
        self.finished.set()

    def wait(self, seconds=20):
        self.group.wait(self.message, seconds)
        assert self.finished.wait(seconds)
        if self.error is not None:
            raise self.error
        return self.data


@pytest.fixture(params=["unix", "tcp"])
def over(request):
    return request.param


@contextlib.contextmanager
def ranks(size, over="unix"):
    ends = [End(rank, size, over) for rank in range(size)]
    try:
        for end in ends:
            end.detector.others = [other.detector for other in ends]
        yield [end.join(ends) for end in ends]
    finally:
        closing = [threading.Thread(target=end.messenger.close) for end in ends]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(10)


@pytest.fixture
def pair(over):
    with ranks(2, over) as ends:
        yield ends


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def numbers(count, start=0):
    return np.arange(start, start + count, dtype=np.float64)


@pytest.mark.parametrize("count", [0, 1, 500, EAGER_BYTES // 8, EAGER_BYTES // 8 + 1, EAGER_BYTES])
def test_both_ranks_may_send_before_they_receive(pair, count):
    sends = [pair[rank].send(numbers(count, rank), 1 - rank) for rank in range(2)]
    found = [pair[rank].receive(np.zeros(count), 1 - rank).wait() for rank in range(2)]
    for work in sends:
        work.wait()
    for rank in range(2):
        np.testing.assert_array_equal(found[rank], numbers(count, 1 - rank))


def test_messages_of_a_tag_keep_their_order_and_tags_do_not_mix(pair):
    sizes = [10, EAGER_BYTES, 3, 0, EAGER_BYTES // 4, 7]  # elements of 8 bytes: some are offered, some sent at once
    sends = [pair[0].send(numbers(size, 10 * i), 1, tag=1) for i, size in enumerate(sizes)]
    sends.append(pair[0].send(numbers(1, 100), 1, tag=-2))
    assert pair[1].receive(np.zeros(1), 0, tag=-2).wait() == [100]
    for i, size in enumerate(sizes):
        np.testing.assert_array_equal(pair[1].receive(np.zeros(size), 0, tag=1).wait(), numbers(size, 10 * i))
    for work in sends:
        work.wait()


def test_a_receiver_keeps_little_of_what_nobody_asked_for_and_any_order_works(pair):
    count, each = 12, EAGER_BYTES
    sends = [pair[0].send(np.full(each, i, np.uint8), 1, tag=i) for i in range(count)]
    pair[0].send(np.zeros(1), 1, tag=count).wait()  # what was sent at once is there
    pair[1].receive(np.zeros(1), 0, tag=count).wait()
    kept = sum(
        len(one.data)
        for list_ in pair[1].messenger._receiver._matching.unexpected.values()
        for one in list_
        if one.data
    )
    assert 0 < kept <= CREDIT_BYTES
    for i in reversed(range(count)):
        assert set(pair[1].receive(np.zeros(each, np.uint8), 0, tag=i).wait().tolist()) == {i}
    for work in sends:
        work.wait()
    for i in range(count):  # the credit comes back
        receive = pair[1].receive(np.zeros(each, np.uint8), 0)
        pair[0].send(np.full(each, i, np.uint8), 1).wait()
        receive.wait()
    assert pair[0].messenger._sender._receivers[1].credit > 0


def test_a_receive_from_any_rank_takes_the_first_message_with_its_tag(over):
    with ranks(3, over) as ends:
        ends[1].send(numbers(2, 10), 0, tag=5).wait()
        first = ends[0].receive(np.zeros(2), None, tag=5)
        np.testing.assert_array_equal(first.wait(), numbers(2, 10))
        second = ends[0].receive(np.zeros(EAGER_BYTES), None, tag=6)
        other = ends[2].send(numbers(EAGER_BYTES, 20), 0, tag=6)
        np.testing.assert_array_equal(second.wait(), numbers(EAGER_BYTES, 20))
        other.wait()
        assert (first.message.source, second.message.source) == (1, 2)


def test_a_thousand_tags_leave_nothing_behind(pair):
    def counts():
        gc.collect()  # what earlier tests left, too, whose end would hide growth
        with open("/proc/self/maps") as maps:
            return threading.active_count(), len(os.listdir("/proc/self/fd")), sum(1 for _ in maps)

    def exchange(tag):
        send = pair[0].send(numbers(4, tag), 1, tag)
        np.testing.assert_array_equal(pair[1].receive(np.zeros(4), 0, tag).wait(), numbers(4, tag))
        send.wait()

    exchange(0)
    before = counts()
    for tag in range(1, 1001):
        exchange(tag)
    threads, files, maps = (after - before for before, after in zip(before, counts(), strict=True))
    assert threads <= 0 and files <= 0 and maps <= 4  # of the allocator; fewer, where an earlier test's thread ended
    for end in pair:
        own = end.messenger
        assert not own._receiver._matching.posted and not own._receiver._matching.unexpected
        assert not own._receiver._taken and not own._progress.pending


@pytest.mark.parametrize("count", [3, EAGER_BYTES])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_other_sizes_and_types_are_rejected_and_the_next_message_arrives(pair, count, first):
    started = {}
    for step in (first, "receive" if first == "send" else "send"):
        if step == "send":
            started[step] = pair[0].send(numbers(count), 1)
        else:
            started[step] = pair[1].receive(np.zeros(count - 1, np.int64), 0)
    with pytest.raises(MismatchError, match=r"group, 0 to 1, tag 0.*int64.*float64"):
        started["receive"].wait()
    if 8 * count > EAGER_BYTES:  # the data has not left yet
        with pytest.raises(MismatchError, match="int64"):
            started["send"].wait()
    send = pair[0].send(numbers(5), 1)
    np.testing.assert_array_equal(pair[1].receive(np.zeros(5), 0).wait(), numbers(5))
    send.wait()


def test_groups_do_not_mix(pair):
    other = [MessageGroup(end.messenger, 2, "other", [0, 1], {}) for end in pair]
    Pending(other[0], other[0].send, numbers(1, 7), 1, 0)
    pair[0].send(numbers(1, 8), 1)
    assert pair[1].receive(np.zeros(1), 0).wait() == [8]
    assert Pending(other[1], other[1].receive, np.zeros(1), 0, 0).wait() == [7]


def test_what_was_sent_before_a_rank_leaves_can_still_be_fetched(pair):
    small = pair[0].send(numbers(3), 1, tag=1)
    receive = pair[1].receive(np.zeros(4 * EAGER_BYTES), 0, tag=2)
    large = pair[0].send(numbers(4 * EAGER_BYTES), 1, tag=2)
    while pair[0].messenger._sender._receivers[1].offered:  # until its data is under way
        time.sleep(0.001)
    pair[0].messenger.close()
    pair[1].detector.left.add(0)
    np.testing.assert_array_equal(receive.wait(), numbers(4 * EAGER_BYTES))
    np.testing.assert_array_equal(pair[1].receive(np.zeros(3), 0, tag=1).wait(), numbers(3))
    small.wait()
    large.wait()
    with pytest.raises(PeerLeft):
        pair[1].receive(np.zeros(3), 0, tag=1).wait()


def test_closing_a_group_ends_its_messages_at_both_ends(pair):
    offered = pair[0].send(numbers(EAGER_BYTES), 1, tag=1)
    waiting = pair[0].receive(np.zeros(1), 1, tag=2)
    pair[0].send(np.zeros(1), 1, tag=3).wait()
    pair[1].receive(np.zeros(1), 0, tag=3).wait()
    pair[0].group.close()
    for work in (offered, waiting):
        with pytest.raises(RingError, match="was closed before"):
            work.wait()
    with pytest.raises(RingError, match="has been closed"):
        pair[0].send(np.zeros(1), 1)
    with pytest.raises(PeerFailed, match="rank 0 closed group"):
        pair[1].receive(np.zeros(EAGER_BYTES), 0, tag=1).wait()


@pytest.mark.parametrize("first", ["send", "close"])
def test_a_large_send_ends_if_its_receiver_has_closed_the_group(pair, first):
    pair[0].send(np.zeros(1), 1, tag=2).wait()
    if first == "close":
        pair[1].group.close()
    offered = pair[0].send(numbers(EAGER_BYTES), 1, tag=1)
    if first == "send":
        pair[0].send(np.zeros(1), 1, tag=3).wait()
        pair[1].receive(np.zeros(1), 0, tag=3).wait()  # so the offer has arrived, too
        pair[1].group.close()
    with pytest.raises(PeerFailed, match=r"rank 1 closed group before group, 0 to 1, tag 1 was complete: rank 0 waits"):
        offered.wait()


@pytest.mark.parametrize("first", ["ask", "close"])
def test_a_receive_ends_if_its_sender_closes_the_group_but_gets_what_was_sent_before(pair, first, monkeypatch):
    monkeypatch.setattr(message_closing, "LONG", 0.05)
    pair[0].send(numbers(3), 1, tag=1).wait()
    if first == "close":
        pair[0].group.close()
    waiting = pair[1].receive(np.zeros(3), 0, tag=2)
    if first == "ask":
        wait_until(lambda: pair[0].messenger._closed_groups._askers)
        pair[0].group.close()
    with pytest.raises(PeerFailed, match=r"rank 0 closed group before group, 0 to 1, tag 2 was complete: rank 1 waits"):
        waiting.wait()
    with pytest.raises(PeerFailed, match="rank 0 closed group"):  # at once from now on
        pair[1].receive(np.zeros(3), 0, tag=3).wait()
    np.testing.assert_array_equal(pair[1].receive(np.zeros(3), 0, tag=1).wait(), numbers(3))


def test_a_group_can_be_closed_after_its_connections(pair):
    for tag in range(3):  # enough to return credit for
        pair[0].send(np.zeros(EAGER_BYTES, np.uint8), 1, tag).wait()
    pair[1].receive(np.zeros(EAGER_BYTES, np.uint8), 0, tag=2).wait()
    pair[1].messenger.close()
    pair[1].group.close()
    assert not pair[1].messenger._receiver._matching.unexpected


def test_an_interrupted_receive_is_taken_back_and_the_next_one_gets_the_message(pair):
    first, late = np.full(4, -1.0), np.zeros(4)
    waiting = pair[1].receive(first, 0)
    pair[1].group.interrupt(waiting.message, KeyboardInterrupt())
    with pytest.raises(RingError, match="rank 1 was interrupted in group, 0 to 1, tag 0 by KeyboardInterrupt before"):
        waiting.wait()
    pair[0].send(numbers(4), 1)
    np.testing.assert_array_equal(pair[1].receive(late, 0).wait(), numbers(4))
    assert (first == -1).all()  # memory that the script has used again


def test_a_receive_interrupted_while_data_comes_writes_no_more_and_breaks_its_group(pair):
    target = np.zeros(8 * EAGER_BYTES)
    offered = pair[0].send(numbers(len(target)), 1)
    with pair[1].messenger._progress.lock:  # its data cannot come before the interruption
        waiting = pair[1].receive(target, 0)
        while not pair[1].messenger._receiver._taken and not any(
            link.item for link in pair[1].messenger._receiver._links.values()
        ):
            pair[1].messenger._progress._step(0.01)
        pair[1].group.interrupt(waiting.message, ZeroDivisionError())
    target[:] = -1
    with pytest.raises(PeerFailed, match="rank 1 was interrupted in group"):
        offered.wait()
    with pytest.raises(RingError, match="by ZeroDivisionError, and the message that was arriving is lost"):
        waiting.wait()
    with pytest.raises(RingError, match="all ranks must recreate group"):
        pair[1].receive(np.zeros(1), 0, tag=1)
    assert (target == -1).all()
    with pytest.raises(PeerFailed, match="rank 1 was interrupted in group, 0 to 1, tag 0 by ZeroDivisionError"):
        pair[0].send(np.zeros(1), 1)


def test_a_member_that_breaks_the_group_ends_the_messages_of_the_others(pair):
    target = np.zeros(3)
    receiving, offered = pair[0].receive(target, 1), pair[0].send(numbers(EAGER_BYTES), 1, tag=1)
    other = MessageGroup(pair[0].messenger, 2, "other", [0, 1], {})
    pair[0].group.fail(PeerFailed("rank 1 was interrupted", 1))
    for call in (receiving.wait, offered.wait, lambda: pair[0].send(np.zeros(1), 1)):
        with pytest.raises(PeerFailed, match="rank 1 was interrupted"):
            call()
    assert not pair[0].messenger._receiver._matching.posted and not pair[0].messenger._sender._receivers[1].offered
    Pending(other, other.send, np.zeros(1), 1, 0).wait()


@pytest.mark.parametrize("count", [4, 8 * EAGER_BYTES])
def test_an_interrupted_send_goes_on_from_a_copy(pair, count):
    data = numbers(count)
    with pair[0].messenger._progress.lock:
        sending = pair[0].send(data, 1)
        pair[0].group.interrupt(sending.message, KeyboardInterrupt())
        data[:] = -1
    np.testing.assert_array_equal(pair[1].receive(np.zeros(count), 0).wait(), numbers(count))
    sending.wait()


def test_an_exception_while_bytes_move_ends_all_messages(pair, monkeypatch):
    waiting = pair[0].receive(np.zeros(1), 1)
    pair[0].messenger._progress._driver = waiting.message, 0  # its own thread moves nothing
    monkeypatch.setattr(pair[0].messenger._progress, "_tick", lambda now: 1 // 0)
    pair[0].messenger._progress._next_tick = 0.0
    with pytest.raises(ZeroDivisionError):
        pair[0].messenger._progress._step(0.01)
    for work in (waiting.wait, lambda: pair[0].receive(np.zeros(1), 1)):
        with pytest.raises(RingError, match="rank 0: moving messages was ended by ZeroDivisionError"):
            work()
    with pytest.raises(PeerFailed, match="rank 0: moving messages was ended by ZeroDivisionError"):
        pair[1].receive(np.zeros(1), 0)  # no answer will come


def test_many_pending_messages_cost_no_look_each(pair):
    waiting = [pair[0].receive(np.zeros(1), 1, tag) for tag in range(10_000)]
    with pair[0].messenger._progress.lock:
        pair[0].messenger._tick(time.monotonic() + 30)
        assert pair[0].detector.asked == []
        pair[0].detector.left.add(1)
        pair[0].messenger._tick(time.monotonic() + 30)
        assert len(pair[0].detector.asked) == len(waiting)


def test_a_failure_elsewhere_ends_pending_messages(pair):
    waiting = pair[0].receive(np.zeros(1), 1)
    pair[0].detector.error = PeerFailed("rank 1 failed: why", 1)
    with pytest.raises(PeerFailed, match="rank 1 failed: why"):
        waiting.wait()
    assert not pair[0].messenger._receiver._matching.posted


def test_a_lost_connection_is_reported_if_no_reason_arrives(pair, monkeypatch):
    monkeypatch.setattr(message_watch, "REASON", 0.2)
    pair[0].send(np.zeros(1), 1).wait()
    pair[1].receive(np.zeros(1), 0).wait()
    pair[0].messenger._sender._receivers[1].link.socket.shutdown(2)
    with pytest.raises(PeerFailed, match="rank 1 lost its connection to rank 0"):
        pair[1].receive(np.zeros(1), 0).wait()


def test_a_receive_from_any_rank_fails_once_all_others_have_left():
    with ranks(3) as ends:
        waiting = ends[0].receive(np.zeros(1), None)
        ends[0].detector.left.add(1)
        time.sleep(0.3)
        assert not waiting.finished.is_set()
        ends[0].detector.left.add(2)
        with pytest.raises(PeerLeft):
            waiting.wait()


def test_a_message_that_nobody_sends_times_out(monkeypatch):
    monkeypatch.setenv("RING_TIMEOUT", "0.2")
    with ranks(2) as ends, pytest.raises(TimeoutExceeded, match="receive timed out after waiting 0.2 s for rank 1"):
        ends[0].receive(np.zeros(1), 1).wait()


def test_ranks_with_another_secret_are_rejected(over):
    with ranks(2, over) as ends:
        near, addresses = (range(2), []) if over == "unix" else ((), ["127.0.0.1"])
        stranger = Messenger(0, b"another", near, addresses)
        group = MessageGroup(stranger, 1, "group", [0, 1], {1: ends[1].messenger.address})
        send = Pending(group, group.send, np.zeros(1), 1, 0)
        receive = ends[1].receive(np.zeros(1), 0)
        time.sleep(0.3)
        assert not send.finished.is_set() and not receive.finished.is_set()
        assert "secret" in stranger._sender._receivers[1].problem
        stranger._failure_detector = Detector()
        stranger._failure_detector.aborted = True  # no need to wait for it at the end
        stranger.close()


def test_many_threads_send_and_receive_at_once(over):
    with ranks(3, over) as ends:

        def talk(rank, tag):
            for step in range(20):
                others = [other for other in range(3) if other != rank]
                sends = [ends[rank].send(numbers(50, 100 * rank + step), other, tag) for other in others]
                for other in others:
                    found = ends[rank].receive(np.zeros(50), other, tag).wait()
                    np.testing.assert_array_equal(found, numbers(50, 100 * other + step))
                for work in sends:
                    work.wait()
            done.append((rank, tag))

        done = []
        threads = [threading.Thread(target=talk, args=(rank, tag)) for rank in range(3) for tag in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(done) == 9
