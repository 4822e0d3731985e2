"""Meetings of some ranks over rank 0's channel, which takes no part in them."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import PeerLeft
from ring_plugins.core.control import meetings as module
from ring_plugins.core.control.meetings import Meetings
from tests.core.control.test_channel import channels, connected  # noqa: F401 - a fixture

NOBODY_FAILS = SimpleNamespace(check=lambda *_: None, mesh=None, aborted=False, rejection=lambda *_: "")


def meetings_of(made):
    return [Meetings(channel, NOBODY_FAILS) for channel in made]


def test_members_meet_without_the_others_in_any_order(channels):  # noqa: F811
    server, clients = connected(channels, 4)
    of = meetings_of([server, *clients])
    order = {0: [(2, 0)], 1: [(1, 3), (3, 1), (1, 3)], 2: [(2, 0)], 3: [(1, 3), (3, 1), (1, 3)]}

    def meet(rank):
        return [of[rank].gather("it", ranks, [rank]) == [[other] for other in ranks] for ranks in order[rank]]

    with ThreadPoolExecutor(4) as threads:
        assert [result for results in threads.map(meet, order) for result in results] == [True] * 8
    assert [one._arrived for one in of] == [{}] * 4 and [one._over for one in of] == [{}] * 4


def test_threads_of_the_same_members_meet_for_different_things_in_any_order(channels):  # noqa: F811
    of = meetings_of([(made := connected(channels, 2))[0], *made[1]])
    with ThreadPoolExecutor(4) as threads:
        began = []
        for rank, names in enumerate(("ab", "ba")):
            for name in names:
                began.append((name, threads.submit(of[rank].gather, name, (0, 1), [name, rank])))
                while of[rank]._before[name, (0, 1)] == 0:
                    time.sleep(0.001)
        assert [found.result() for _, found in began] == [[[name, 0], [name, 1]] for name, _ in began]


def test_ranks_that_cannot_reach_rank_0_say_so(channels, monkeypatch):  # noqa: F811
    monkeypatch.setattr(module, "REASON", 0.05)
    server, clients = connected(channels, 3)
    meetings = meetings_of([server, *clients])[1]
    end = time.monotonic() + 10
    while 1 not in server.peers and time.monotonic() < end:
        time.sleep(0.01)
    server.close()
    with pytest.raises(PeerLeft, match="rank 1 cannot make a group: ranks meet over rank 0, which has left the job"):
        meetings.gather("a group", (1, 2), None)


def test_a_rank_that_is_not_one_of_them_is_not_counted(channels):  # noqa: F811
    server, _ = connected(channels, 2)
    with pytest.raises(ValueError, match="rank 0 is not one of these"):
        Meetings(server, NOBODY_FAILS)._note_arrival(0, {"name": "it", "ranks": [1], "number": 0, "item": None})
