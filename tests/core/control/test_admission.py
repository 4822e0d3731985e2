"""Rounds of an admission among threads, each of which has a liveness segment; the lock of one that dies is let go."""

import os
import signal
import threading
import time

import pytest

from ring_plugins.core.control import admission
from ring_plugins.core.control.admission import Admission, NotAdmitted
from ring_plugins.core.control.liveness import Liveness


class Peers:
    """Liveness segments of some ranks in one process, of which none ever looks dead: the process has all locks."""

    def __init__(self, monkeypatch, count):
        self.dead, self.newcomers = set(), ()
        self.own = [Liveness.create(rank) for rank in range(count)]
        monkeypatch.setattr(Liveness, "has_died", lambda one: one.rank in self.dead)

    def admission(self, rank):
        return Admission(self.own[rank], [one for one in self.own if one.rank != rank], 32, self.newcomers)

    def run(self, *functions):
        """What the function of each rank returns, or the text of the `NotAdmitted` that it raises."""
        found = [None] * len(functions)

        def call(rank, function):
            try:
                found[rank] = function(self.admission(rank))
            except NotAdmitted as reason:
                found[rank] = f"not admitted: {reason}"

        threads = [threading.Thread(target=call, args=item) for item in enumerate(functions) if item[1]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found


def test_everyone_has_what_everyone_told_in_each_round(monkeypatch):
    def rounds(admission):
        return [admission.gather({"rank": admission._own.rank, "round": i}) for i in range(3)]

    found = Peers(monkeypatch, 3).run(rounds, rounds, rounds)
    wanted = [{rank: {"rank": rank, "round": i} for rank in range(3)} for i in range(3)]
    assert found == [wanted] * 3


def test_the_problem_of_one_keeps_all_from_going_on(monkeypatch):
    found = Peers(monkeypatch, 2).run(
        lambda admission: admission.gather({}), lambda admission: admission.gather({"problem": "no memory"})
    )
    assert found == ["not admitted: no memory"] * 2


@pytest.mark.parametrize("how", ["dead", "failed"])
def test_one_that_is_gone_keeps_all_from_going_on_unless_it_has_told(monkeypatch, how):
    peers = Peers(monkeypatch, 3)
    if how == "dead":
        peers.dead.add(2)
    else:
        peers.own[2].fail(2, "rank 2 failed")
    gather = lambda admission: admission.gather({"rank": admission._own.rank})  # noqa: E731
    assert peers.run(gather, gather, None)[:2] == ["not admitted: "] * 2
    peers.own[2].tell(33, b'{"rank": 2}')
    told = {rank: {"rank": rank} for rank in range(3)}
    assert peers.run(gather, gather, None)[:2] == [told] * 2


def test_a_newcomer_that_does_not_answer_is_killed_and_a_member_is_not(monkeypatch):
    peers, killed = Peers(monkeypatch, 3), []

    def kill(pid, number):
        killed.append((pid, number))
        peers.dead.add(2)

    monkeypatch.setattr(admission.os, "kill", kill)
    monkeypatch.setattr(admission, "_PATIENCE", 0.1)
    peers.newcomers = (2,)
    gather = lambda one: one.gather({"rank": one._own.rank})  # noqa: E731

    def gather_late(one):
        time.sleep(0.5)
        return gather(one)

    told = {rank: {"rank": rank} for rank in range(3)}
    assert peers.run(gather, gather_late, gather) == [told] * 3 and not killed
    for one in peers.own:
        one.tell(0, b"")
        one.tell(1, b"")
    assert peers.run(gather, gather_late, None)[:2] == ["not admitted: "] * 2
    assert set(killed) == {(os.getpid(), signal.SIGKILL)}
