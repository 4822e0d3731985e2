"""The loop in which ranks wait: it ends when it should, with the reason, and can be seen from outside."""

import threading
import time
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import MembersLost, PeerFailed, TimeoutExceeded
from ring_plugins.core.base.facts import Facts
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control import wait as module
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.wait import Wait, long_waits


class Detector:
    """Raises `error` when asked, once `after` calls have passed."""

    def __init__(self, error=None, after=0):
        self.error, self.after, self.aborted, self.asked = error, after, False, []

    mesh, facts = None, Facts()

    def check(self, communicator, missing, what):
        self.asked.append((communicator, list(missing), what))
        if self.error is not None and len(self.asked) > self.after:
            raise self.error


def until(wait, ready, missing=(1,), **options):
    wait.until(ready, lambda: missing, lambda: "barrier()", **options)


def test_a_condition_that_holds_at_once_costs_no_sleep():
    naps = []
    until(Wait("ring", None), lambda: True, nap=naps.append)
    assert naps == []


def test_the_failure_detector_ends_a_wait():
    detector = Detector(PeerFailed("rank 1 failed", 1))
    with pytest.raises(PeerFailed, match="rank 1 failed"):
        until(Wait("ring", detector), lambda: False)
    assert detector.asked[0] == ("ring", [1], "barrier()")


def test_a_peer_that_arrived_before_it_ended_is_no_failure():
    detector = Detector(PeerFailed("gone", 1))
    until(Wait("ring", detector), lambda: bool(detector.asked))  # it arrives while the detector is being asked
    assert len(detector.asked) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError("of the script"), ValueError()])
def test_a_signal_handlers_exception_is_raised_although_the_peer_arrives_meanwhile(error):
    detector = Detector(error)
    with pytest.raises(type(error)):
        until(Wait("ring", detector), lambda: bool(detector.asked))


def test_the_reason_that_a_peer_gave_replaces_the_broken_connection():
    detector = Detector(PeerFailed("rank 1 failed: out of data", 1), after=3)

    def broken():
        raise PeerFailed("lost the connection to rank 1", 1)

    with pytest.raises(PeerFailed, match="out of data"):
        until(Wait("ring", detector), broken)


def test_without_a_reason_the_broken_connection_is_raised_and_the_rank_counts_as_aborted(monkeypatch):
    monkeypatch.setattr(module, "REASON", 0.05)
    detector = Detector()

    def broken():
        raise PeerFailed("lost the connection to rank 1", 1)

    with pytest.raises(PeerFailed, match="lost the connection"):
        until(Wait("ring", detector), broken)
    assert detector.aborted


def test_a_broken_connection_waits_until_the_mesh_knows_whether_its_peer_is_lost(monkeypatch):
    """It asks a host that is gone for RING_NETWORK_TIMEOUT."""
    monkeypatch.setattr(module, "REASON", 0.05)
    monkeypatch.setenv("RING_NETWORK_TIMEOUT", "20")
    began, detector = time.monotonic(), Detector()
    detector.mesh = SimpleNamespace(
        dead=frozenset,
        interrupts=lambda *_: time.monotonic() - began > 0.3,
        members_lost=lambda: MembersLost("rank 1 is lost", 1),
    )

    def broken():
        raise PeerFailed("lost the connection to rank 1", 1)

    with pytest.raises(MembersLost, match="rank 1 is lost"):
        until(Wait("ring", detector), broken)


def test_a_wait_without_end_times_out_and_names_the_missing(monkeypatch):
    monkeypatch.setenv("RING_TIMEOUT", "0.05")
    with pytest.raises(
        TimeoutExceeded, match=r"barrier\(\) timed out after waiting 0.05 s for ranks 1, 3; set RING_TIM"
    ):
        until(Wait("ring", None), lambda: False, missing=(1, 3))


def test_a_wait_that_is_given_up_ends_although_nobody_is_missing_for_good():
    wait = Wait("test", None)
    wait.given_up = MembersLost("rank 1 died.", 1)
    with pytest.raises(MembersLost, match="rank 1 died"):
        wait.until(lambda: False, lambda: [2], lambda: "a bucket")
    wait.given_up = None
    wait.until(lambda: True, lambda: [2], lambda: "a bucket")


def test_a_long_wait_is_published_while_it_lasts(monkeypatch):
    monkeypatch.setattr(module, "LONG", 0.05)
    wait, arrived = Wait("ring", None), threading.Event()
    thread = threading.Thread(target=until, args=(wait, arrived.is_set), kwargs={"arrival": True})
    thread.start()
    try:
        while thread.ident not in long_waits:
            time.sleep(0.001)
        found = long_waits[thread.ident]
        assert (found.communicator, found.what, found.missing) == ("ring", "barrier()", (1,))
        assert wait.waited_so_far() > 0.05 and wait.waited_for_arrival == 0.0
    finally:
        arrived.set()
        thread.join()
    assert thread.ident not in long_waits
    assert wait.waited_for_arrival == wait.waited_so_far() > 0.05


class Seen:
    """What a wait asks, in order: who is dead, and who is missing. Members end as on one host."""

    aborted = False

    def __init__(self, dead, missing):
        self.asked, self._dead, self._missing = [], dead, missing
        self.mesh = Mesh(Members(0, [Member(0)]), Channel(0, 1), None, 1, confirms=False)
        self.mesh.members_lost, self.mesh.dead = lambda: MembersLost("ranks died", 1), self.dead

    def dead(self):
        self.asked.append("dead")
        return frozenset(self._dead.pop(0) if len(self._dead) > 1 else self._dead[0])

    def missing(self):
        self.asked.append("missing")
        return self._missing.pop(0) if len(self._missing) > 1 else self._missing[0]

    def check(self, communicator, missing, what):
        pass


def test_a_wait_gives_up_only_when_all_that_are_missing_are_dead_and_looks_for_the_dead_first():
    seen = Seen(dead=[{1}, {1}, {1, 2}], missing=[[1, 3], [1, 3], [1]])
    with pytest.raises(MembersLost, match="ranks died"):
        Wait("test", seen).until(lambda: False, seen.missing, lambda: "barrier()")
    assert seen.asked == ["dead", "missing"] * 3


def test_a_rank_that_arrived_before_it_died_is_not_missing():
    seen = Seen(dead=[{1}], missing=[[2]])
    Wait("test", seen).until(lambda: len(seen.asked) > 6, seen.missing, lambda: "barrier()")
