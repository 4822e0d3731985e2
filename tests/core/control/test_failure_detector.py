"""Reports of failures between ranks, over a fake channel."""

import errno

import pytest

from ring_plugins.core.base.errors import DeadlockError, PeerFailed, PeerLeft
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control import failure_detector as module
from ring_plugins.core.control.channel import EVERYONE
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.net.auth import Disconnected

MEMBERS = [Member(rank, rank, f"host{rank}", 100 + rank, f"domain{rank}") for rank in range(3)]


class FakeChannel:
    """Keeps what is sent to others."""

    def __init__(self, rank):
        self.rank, self.handlers, self.sent = rank, {}, []

    def on(self, kind, handler, at_once=False):
        self.handlers[kind] = handler

    def on_end(self, handler):
        self.handlers["end"] = handler

    def tell(self, rank, kind, body):
        if rank == self.rank:
            self.handlers[kind](rank, body)
        else:
            self.sent.append((rank, kind, body))

    def flush(self, seconds):
        return True


def detector(rank):
    channel = FakeChannel(rank)
    return FailureDetector(Members(rank, MEMBERS), None, channel), channel


def test_a_failure_is_reported_once_with_its_place_in_the_code():
    one, channel = detector(1)
    try:
        raise ValueError("no data")
    except ValueError as error:
        one.fail(error)
        one.fail(error)
    ((to, kind, body),) = channel.sent
    assert (to, kind, body["rank"]) == (0, "failed", 1)
    assert body["text"].startswith("rank 1 failed: ValueError: no data (") and __file__ in body["text"]


def test_a_failure_caused_by_a_peer_is_passed_on_as_the_peers():
    one, channel = detector(1)
    one.fail(PeerFailed("rank 2 failed: out of memory", 2))
    assert channel.sent[0][2] == {"rank": 2, "text": "rank 2 failed: out of memory", "of": 1}


def test_rank_0_passes_on_the_first_failure_and_every_wait_then_raises_it():
    zero, channel = detector(0)
    first = {"rank": 1, "text": "rank 1 failed: first", "of": 1}
    channel.handlers["failed"](1, first)
    channel.handlers["failed"](2, {"rank": 2, "text": "rank 2 failed: second", "of": 2})
    assert channel.sent == [(EVERYONE, "failed", first)]
    assert not zero.aborted
    with pytest.raises(PeerFailed, match="rank 1 failed: first"):
        zero.check("ring", [2], "barrier()")
    assert zero.aborted


def test_a_broken_communicator_fails_on_its_members_now_or_when_they_make_it():
    class State:
        error = None

        def fail(self, error):
            self.error = error

    (zero, channel), (one, own), state = detector(0), detector(1), State()
    one.break_communicator(7, "rank 1 was interrupted", [])
    ((to, kind, body),) = own.sent
    assert (to, kind, body) == (0, "broken", {"key": 7, "rank": 1, "text": "rank 1 was interrupted"})
    zero.watch(7, state)
    channel.handlers["broken"](1, body)
    known = {"key": 7, "rank": 1, "member": 0}
    assert channel.sent == [(1, "knows of broken", known), (EVERYONE, "broken", body)]
    own.handlers["knows of broken"](0, known)
    assert one._knowing[7] == {0, 1}
    assert (str(state.error), state.error.rank) == ("rank 1 was interrupted", 1)
    late = State()
    zero.watch(7, late)
    assert late.error is state.error
    assert zero.failure() is None  # the job goes on
    own.handlers["broken"](0, body)
    mine = State()
    one.watch(8, mine)
    assert mine.error is None


def test_a_rank_ignores_reports_of_its_own_failure():
    one, channel = detector(1)
    channel.handlers["failed"](0, {"rank": 1, "text": "rank 1 failed", "of": 1})
    assert one.failure() is None


@pytest.mark.parametrize(
    ("how", "text", "network"),
    [
        (
            Disconnected("it closed the connection"),
            r"rank 2 \(process 102 on host2\) died without reporting an error",
            False,
        ),
        (
            Disconnected.by(OSError(errno.ECONNRESET, "Connection reset by peer")),
            r"rank 2 \(process 102 on host2\) died without reporting an error",
            False,
        ),
        (
            Disconnected.by(OSError(errno.EPIPE, "Verbindung beendet")),
            r"rank 2 \(process 102 on host2\) died without reporting an error",
            False,
        ),
        (
            Disconnected("it sent an invalid message", is_invalid=True),
            r"rank 0 has closed its control connection to rank 2 \(process 102 on host2\): it sent an invalid message",
            False,
        ),
        (
            Disconnected.by(OSError(errno.ETIMEDOUT, "closed for the night")),
            r"rank 0 on host0 cannot reach rank 2 .*: the network between host0 and host2 is lost",
            True,
        ),
    ],
)
def test_a_closed_connection_is_a_death_and_a_silent_one_a_lost_network(how, text, network):
    zero, channel = detector(0)
    channel.handlers["end"](2, how)
    with pytest.raises(PeerFailed, match=text):
        zero.check("ring", [1], "barrier()")
    assert zero.has_lost_a_process() and zero.facts.has_lost_the_network is network
    assert channel.sent[0][2]["of"] == (-1 if network else 2)  # a rank behind a lost network may still receive it


def test_a_rank_that_left_fails_only_those_that_wait_for_it(monkeypatch):
    monkeypatch.setattr(module, "IN_FLIGHT", 0.0)
    zero, channel = detector(0)
    channel.handlers["end"](2, None)
    zero.check("ring", [1], "barrier()")
    with pytest.raises(PeerLeft, match=r"rank 2 has left the job, but rank 0 waits for it in barrier"):
        zero.check("ring", [1, 2], "barrier()")
    for communicator, likely in (
        (
            "ring",
            r"Does rank 2 make this call at all\? All ranks must: .* such as `if rank\(\) == 0:`. Otherwise the ranks",
        ),
        ("named operations, allreduce(name='x')", "Rank 2 has called nothing of this name: all ranks must"),
        ("local updates", r"different numbers of steps between exchanges, but .* the last one: .* calls finish\(\)"),
        ("gradients", "Usually the ranks took different numbers of steps: give every rank the same number of batches"),
    ):
        with pytest.raises(PeerLeft, match=likely):
            zero.check(communicator, [2], "barrier()")
    zero.forward_departures()
    zero.forward_departures()
    assert channel.sent == [(EVERYONE, "left", {"ranks": [2]})]


def test_a_rank_that_left_with_an_exit_status_has_failed(monkeypatch):
    monkeypatch.setattr(module, "IN_FLIGHT", 0.0)
    zero, channel = detector(0)
    channel.handlers["exits"](2, {"rank": 2, "status": 3})
    assert channel.sent == [(EVERYONE, "exits", {"rank": 2, "status": 3})]
    channel.handlers["end"](2, None)
    zero.check("ring", [1], "barrier()")
    with pytest.raises(PeerFailed, match=r"rank 2 ended with exit status 3 \(sys.exit\), while rank 0 waits"):
        zero.check("ring", [1, 2], "barrier()")


def test_a_deadlock_ends_waits_of_its_communicator_only():
    one, _ = detector(1)
    one.deadlocks["ring"] = "rank 1 waits for rank 2"
    one.check("other", [2], "barrier()")
    with pytest.raises(DeadlockError, match="rank 1 waits for rank 2"):
        one.check("ring", [2], "barrier()")
    assert one.has_raised and not one.aborted, "the script may catch it, and then hear of a failure"
