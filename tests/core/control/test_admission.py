"""Rounds of an admission among threads, each of which has a liveness segment; the lock of one that dies is let go."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from ring_plugins.core.base import progress_line
from ring_plugins.core.control import admission
from ring_plugins.core.control.admission import Admission, NotAdmitted, begin_together
from ring_plugins.core.control.liveness import Liveness
from ring_plugins.core.elastic.joining import wait_for_invitation, what_is_pending
from ring_plugins.core.rendezvous.slots import SlotOwner, Slots


class Peers:
    """Liveness segments of some ranks in one process, of which none ever looks dead: the process has all locks."""

    def __init__(self, monkeypatch, count):
        self.dead, self.joiners = set(), ()
        self.own = [Liveness.create(rank) for rank in range(count)]
        monkeypatch.setattr(Liveness, "has_died", lambda one: one.rank in self.dead)

    def admission(self, rank):
        return Admission(self.own[rank], [one for one in self.own if one.rank != rank], 32, self.joiners)

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


@pytest.mark.parametrize("told", [b"{", b"[1]", b"\xff", b"[" * 60_000])
def test_what_nobody_can_read_or_is_too_long_keeps_all_from_going_on(monkeypatch, told):
    peers = Peers(monkeypatch, 3)
    peers.own[1].tell(33, told)
    gather = lambda admission: admission.gather({})  # noqa: E731
    assert peers.run(gather, None, gather)[::2] == [
        f"not admitted: rank 1 (process {os.getpid()}) has told what cannot be read."
    ] * 2  # fmt: skip
    long = lambda admission: admission.gather({"long": "x" * 200_000})  # noqa: E731
    text, *others = Peers(monkeypatch, 3).run(gather, gather, long)
    assert text.startswith("not admitted: rank 2 has 200") and others == [text] * 2


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


def test_a_joiner_that_does_not_answer_is_killed_and_a_member_is_not(monkeypatch):
    peers, killed = Peers(monkeypatch, 3), []

    def kill(pid, number):
        killed.append((pid, number))
        peers.dead.add(2)

    monkeypatch.setattr(admission.os, "kill", kill)
    monkeypatch.setattr(admission, "_PATIENCE", 0.1)
    peers.joiners = (2,)
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
    peers.dead.clear()  # so it is if a member dies in the same round
    killed.clear()
    for one in peers.own:
        one.tell(0, b"")
        one.tell(1, b"")
    peers.dead.add(1)
    assert peers.run(gather, None, None)[0] == "not admitted: "
    assert set(killed) == {(os.getpid(), signal.SIGKILL)}


def test_a_process_that_waits_to_join_says_for_whom_and_what_they_have_to_do(monkeypatch):
    own, peers = SlotOwner(1, 3, (4711, 5, 4096)), Peers(monkeypatch, 3)
    members, until = [peers.own[0], peers.own[2]], "call TrainingState.commit()"
    who = "process 4711, which takes the place of rank 1, waits for "
    assert what_is_pending(own, members, until) == f"{who}ranks 0, 2 to call TrainingState.commit()"
    with peers.own[0].ready_to_admit():
        assert what_is_pending(own, members, until) == f"{who}rank 2 to call TrainingState.commit(), as rank 0 has"
        with peers.own[2].ready_to_admit():
            assert what_is_pending(own, members, until) == f"{who}ranks 0, 2 to let it join"
    assert what_is_pending(own, members, until) == f"{who}ranks 0, 2 to call TrainingState.commit()"


def test_it_waits_on_if_a_member_tells_what_is_no_call_and_until_no_member_is_left(monkeypatch):
    """And it begins to say so after some seconds."""
    monkeypatch.setattr(progress_line, "FIRST_SECONDS", 0.0)
    said = []
    monkeypatch.setattr(progress_line.logger, "info", said.append)
    rows, peers = Slots(np.zeros(Slots.nbytes(2), np.uint8)), Peers(monkeypatch, 1)
    rows.take(SlotOwner(0, 0, peers.own[0].address), as_member=True)
    peers.own[0].tell(17, b'{"joiners": [3]}')
    found = []
    own = SlotOwner(1, 3, (4711, 5, 4096))
    thread = threading.Thread(target=lambda: found.append(wait_for_invitation(own, 0, rows, "finish the epoch")))
    thread.start()
    while not said:
        time.sleep(0.01)
    assert "takes the place of rank 1, waits for rank 0 to finish the epoch, after 0 s." in said[0]
    assert not found
    peers.own[0].leave()
    thread.join(20)
    assert found == [None]


def test_one_that_has_joined_and_does_not_go_on_is_killed(monkeypatch):
    killed = []
    monkeypatch.setattr(admission, "_PATIENCE", 0.1)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    peers = Peers(monkeypatch, 3)
    peers.dead = {1}
    begin_together(peers.own, lambda: [0, 2])  # nobody waits for one that has died
    assert not killed
    begin_together(peers.own, lambda: [0])
    assert killed == [(peers.own[2].pid, signal.SIGKILL)]
