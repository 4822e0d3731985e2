"""Calls and their outcomes, without any rank: packing, collecting, and which failure is raised."""

import pickle
import sys

import pytest

import ring_plugins as ring
from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.launcher import outcomes
from ring_plugins.launcher.outcomes import Failure, Outcome

FAILED = Failure("a", "ValueError: x")


def test_a_call_returns_its_packed_result():
    outcome = outcomes.call(outcomes.pack_call(divmod, (7,), None), 0)
    assert outcome.failure is not None and outcome.failure.summary.startswith("TypeError")
    assert outcomes.results([outcomes.call(outcomes.pack_call(divmod, (7, 2), {}), 0)]) == [(3, 1)]


class EndsTheProcess:
    """What is loaded may be a module that ends the process that imports it."""

    def __reduce__(self):
        return sys.exit, (0,)


def test_what_cannot_be_loaded_on_a_rank_says_so_and_why():
    missing = pickle.dumps(divmod, 0).replace(b"__builtin__", b"nowhere")
    with pytest.raises(ring.RankFailed, match=r"function or its .* cannot be loaded .*: No module .*nowhere.*import"):
        outcomes.results([outcomes.call(b"[]\n" + missing, 0)])
    with pytest.raises(ring.RankFailed, match=r"cannot be loaded in the rank's process \(SystemExit: 0\)"):
        outcomes.results([outcomes.call(b"[]\n" + pickle.dumps(EndsTheProcess()), 0)])


class Clock:
    """Time that passes only in `sleep`, however busy the machine is."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(outcomes, "time", made)
    return made


def test_collect_returns_when_every_rank_has_reported():
    arrivals = iter([[], [Outcome(1)], [Outcome(0)]])
    assert [outcome.rank for outcome in outcomes.collect(2, lambda _: next(arrivals), None)] == [1, 0]


def test_collect_waits_a_grace_period_for_the_others_after_a_failure(monkeypatch, clock):
    monkeypatch.setattr(outcomes, "GRACE_SECONDS", 0.05)
    arrivals = iter([[Outcome(2, failure=FAILED)], [Outcome(0)]])

    def poll(seconds):
        clock.sleep(0.01)
        return next(arrivals, [])

    assert [outcome.rank for outcome in outcomes.collect(3, poll, None)] == [2, 0]


def test_collect_names_the_ranks_that_did_not_finish_in_time(clock):
    arrivals = iter([[Outcome(1)]])
    with pytest.raises(ring.TimeoutExceeded, match="timeout=0.02: ranks 0, 2 of 3 did not finish in time"):
        outcomes.collect(3, lambda _: clock.sleep(0.005) or next(arrivals, []), 0.02)


def test_of_several_failures_the_first_cause_is_raised():
    cause = Outcome(2, failure=Failure("b", "ValueError: x", "..."))
    later = [
        Outcome(0, failure=Failure("a", "PeerFailed: rank 2 failed", caused_by=2)),
        Outcome(1, outcomes.pack("", 5)),
    ]
    with pytest.raises(ring.RankFailed, match="rank 2 on b failed: ValueError: x"):
        outcomes.results([*later, cause])
    with pytest.raises(ring.RankFailed, match="rank 0 on a"):
        outcomes.results(later)


def test_an_exception_that_cannot_be_pickled_becomes_text():
    failure = Failure("a", "Stubborn: 1 and 2", "", outcomes.pack("", PeerFailed("x", 1))[:-5])
    with pytest.raises(ring.RankFailed, match="rank 0 on a failed: Stubborn: 1 and 2") as caught:
        outcomes.results([Outcome(0, failure=failure)])
    assert caught.value.__cause__ is None


def test_a_call_that_fails_in_a_process_that_has_not_joined_says_so_at_once(monkeypatch, caplog):
    """Its outcome may never be shown: that of the next process in the same place counts."""
    monkeypatch.setenv("RING_JOINS", "3")
    failure = outcomes.call(outcomes.pack_call(int, ("x",), None), 3).failure
    assert failure is not None and failure.is_loss
    assert "before it joined; the other ranks go on without it:\n" in caplog.text
    assert "ValueError: invalid literal for int() with base 10: 'x'" in caplog.text


def test_failures_at_different_places_are_all_shown_and_equal_ones_once():
    def failed(rank, place):
        return Outcome(rank, failure=Failure("a", "MismatchError: x", f"the traceback of rank {rank}", place=place))

    with pytest.raises(ring.RankFailed, match="rank 1 on a failed: MismatchError: x") as caught:
        outcomes.results([failed(1, "line 3"), failed(0, "line 3"), failed(2, "line 8")])
    assert str(caught.value).count("the traceback of rank") == 2
    assert "On rank 1:\nthe traceback of rank 1\n\nOn rank 2:\nthe traceback of rank 2" in str(caught.value)
