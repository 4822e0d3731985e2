"""Which names have been called by all, as rank 0 finds out; tests/horovod/test_named.py has real ranks."""

import _thread
import threading
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import ArgumentError, PeerFailed, PeerLeft
from ring_plugins.core.base.threads import until
from ring_plugins.core.control import meetings
from ring_plugins.core.control.failure_detector import OF_NAMES
from ring_plugins.core.control.named_calls import NamedCalls, NameInUse, _blocks_the_script
from ring_plugins.core.observe.stall import StallWatch


class Channels:
    """Those of some ranks; messages arrive at once."""

    def __init__(self, size):
        self.handlers = [{} for _ in range(size)]
        alive = SimpleNamespace(deadlocks={})
        self.calls = [NamedCalls(Channel(self, rank), alive) for rank in range(size)]
        self.matched = [[] for _ in range(size)]
        for calls, matched in zip(self.calls, self.matched, strict=True):
            calls.on_joined_match = lambda match, matched=matched: matched.append(("joined", match.name))

    def begin(self, rank, name, ranks=(0, 1, 2), value=1):
        def note(match):
            self.matched[rank].append((name, [call and call.get("value") for call in match.calls]))

        self.calls[rank].begin(ranks, name, {"value": value}, note)


class Channel:
    def __init__(self, all_channels, rank):
        self.all, self.rank, self.is_abandoned = all_channels, rank, False

    def on(self, kind, handler, at_once):
        assert at_once
        self.all.handlers[self.rank][kind] = handler

    def tell(self, rank, kind, body):
        self.all.handlers[rank][kind](self.rank, body)


def test_a_name_is_told_once_all_have_called_it_in_one_order_on_all():
    channels = Channels(3)
    for rank, names in enumerate(("ab", "ba", "ba")):
        for name in names:
            channels.begin(rank, name, value=rank)
    assert channels.matched == [[("b", [0, 1, 2]), ("a", [0, 1, 2])]] * 3
    channels.begin(1, "a")  # a name that is over may be called again


def test_a_name_that_waits_for_others_is_not_called_again():
    channels = Channels(2)
    channels.begin(0, "a", (0, 1))
    with pytest.raises(NameInUse, match="name='a' is in use"):
        channels.begin(0, "a", (0, 1))
    channels.begin(0, "a", (0,))  # of other ranks
    assert channels.matched == [[("a", [1])], []]


def test_a_refused_call_is_told_to_the_others_and_the_next_one_matches_their_next():
    channels = Channels(2)
    channels.calls[0].refuse((0, 1), "a", ArgumentError("no"))
    channels.calls[0].refuse((0, 1), "a", NameInUse("told to nobody"))
    channels.begin(0, "a", (0, 1), "next")
    channels.begin(1, "a", (0, 1), "first")
    assert channels.matched == [[], [("a", [None, "first"])]]
    channels.begin(1, "a", (0, 1), "second")
    assert channels.matched[0] == [("a", ["next", "second"])]


def test_a_call_that_is_withdrawn_matches_no_later_one_and_one_that_all_have_made_is_not_withdrawn():
    channels = Channels(2)
    channels.begin(0, "a", (0, 1), "stale")
    assert channels.calls[0].withdraw((0, 1), "a")
    channels.begin(1, "a", (0, 1), "new")
    assert channels.matched == [[], []]
    channels.begin(0, "a", (0, 1), "new")
    assert channels.matched == [[("a", ["new", "new"])]] * 2
    assert not channels.calls[0].withdraw((0, 1), "a")


@pytest.mark.parametrize("error", [PeerLeft, PeerFailed])
def test_a_call_is_withdrawn_although_rank_0_is_gone_and_a_late_answer_harms_nothing(error):
    def check(*_):
        raise error("rank 0 is gone", 0)

    told, matched, handlers = [], [], {}
    alive = SimpleNamespace(check=check, mesh=None, aborted=True, deadlocks={})
    channel = SimpleNamespace(rank=1, reaches=lambda rank: True, is_abandoned=False)
    channel.on = lambda kind, handler, at_once: handlers.update({kind: handler})
    channel.tell = lambda rank, kind, body: told.append(body["call"])
    calls = NamedCalls(channel, alive)
    calls.begin((0, 1), "a", {"shape": []}, matched.append)
    assert calls.withdraw((0, 1), "a") and told == [{"shape": []}, None]
    for late in ([], [{}, {}]):
        handlers["all have called"](0, {"ranks": [0, 1], "name": "a", "calls": late})
    assert not matched and not calls._withdrawn


def test_others_that_wait_for_a_call_find_out_that_it_has_been_made():
    def has_made(name):
        return StallWatch._may_begin(None, {"needs": (f"{OF_NAMES} of 0,1: {name}", 0, 0)}, "needs")

    channels = Channels(2)
    channels.begin(1, "a", (0, 1))
    assert has_made("a") and not has_made("b")
    channels.begin(0, "a", (0, 1))
    assert not has_made("a")
    channels.calls[1].join((0, 1))
    assert has_made("b")
    channels.calls[0].join((0, 1))
    assert not has_made("b")


def test_a_thread_of_tensorflow_blocks_the_script_if_that_has_no_other_threads():
    found = []
    _thread.start_new_thread(lambda: found.append(_blocks_the_script()), ())
    assert until(lambda: found, 10)
    own = threading.Thread(target=lambda: found.append(_blocks_the_script()))
    own.start()
    own.join()
    assert not _blocks_the_script() and found[1:] == [False]


def test_a_rank_that_has_joined_counts_as_one_that_calls_until_all_have():
    channels = Channels(3)
    channels.begin(0, "a")
    channels.calls[1].join((0, 1, 2))
    channels.begin(2, "a")
    assert channels.matched == [[("a", [1, None, 1])], [("joined", "a")], [("a", [1, None, 1])]]
    channels.calls[2].join((0, 1, 2))
    channels.calls[0].join((0, 1, 2))
    assert [calls._all_joined for calls in channels.calls] == [{(0, 1, 2): 0}] * 3
    for rank in range(2):
        channels.begin(rank, "b")
    assert not any(("b", [1, 1, None]) in matched for matched in channels.matched), "rank 2 has to call again"


def test_ranks_that_cannot_reach_rank_0_do_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(meetings, "REASON", 0.05)
    alive = SimpleNamespace(check=lambda *_: None, mesh=None, aborted=False, deadlocks={})
    channel = SimpleNamespace(rank=1, on=lambda *_, **__: None, reaches=lambda rank: False, is_abandoned=False)
    with pytest.raises(PeerLeft, match="rank 1 cannot begin allreduce: ranks meet over rank 0, which has left the job"):
        NamedCalls(channel, alive).wait(lambda: False, lambda: (1, 2), (0, 1, 2), "x", "allreduce")
