"""Agreement on who is left: the decision of the lowest living rank, whatever dies meanwhile."""

import pytest

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.control.failure_detector import FailureDetector, Peer
from ring_plugins.core.control.liveness import Liveness, LocalPeers
from ring_plugins.core.control.membership import Membership, MembersLost
from ring_plugins.core.control.wait import Wait
from tests.core.collectives.mortal_ranks import Mortal, Silent


def members(size, own, dead=(), min_ranks=1):
    everyone = [Mortal(rank) for rank in range(size)]
    for rank in dead:
        everyone[rank].is_dead = True
    peers = LocalPeers(everyone[own], [one for one in everyone if one.rank != own], min_ranks=min_ranks)
    detector = FailureDetector(own, [Peer("host", one.pid, "domain") for one in everyone], peers, Silent())
    return Membership(peers), everyone, Wait("test", detector)


def test_the_lowest_rank_decides_and_tells():
    membership, everyone, wait = members(4, own=0, dead=[2])
    assert membership.agree(wait) == [2]
    assert (membership.ranks, membership.view) == ((0, 1, 3), 1)
    assert everyone[0].decision(1) == (0, 1, 3)


def test_a_rank_above_it_adopts_the_decision_also_if_it_has_seen_another_die():
    membership, everyone, wait = members(4, own=3, dead=[1, 2])
    everyone[0].decide(1, (0, 2, 3))
    assert membership.agree(wait) == [1]
    assert membership.ranks == (0, 2, 3)
    everyone[0].decide(2, (0, 3))
    assert membership.agree(wait) == [2]


def test_the_decision_of_a_rank_that_died_afterwards_counts():
    membership, everyone, wait = members(3, own=2, dead=[0, 1])
    everyone[0].decide(1, (0, 2))
    assert membership.agree(wait) == [1]
    assert membership.agree(wait) == [0]
    assert everyone[2].decision(2) == (2,)


def test_an_older_decision_does_not_count():
    membership, everyone, wait = members(3, own=1, dead=[0])
    everyone[0].decide(0, (0, 1))
    assert membership.agree(wait) == [0]
    assert membership.ranks == (1, 2)


def test_a_rank_that_fails_instead_of_deciding_ends_the_agreement():
    membership, everyone, wait = members(3, own=2, dead=[1])
    everyone[0].fail(0, "rank 0 failed: ValueError")
    with pytest.raises(PeerFailed, match="rank 0 failed: ValueError"):
        membership.agree(wait)


def test_too_few_ranks_do_not_go_on():
    membership, _, wait = members(3, own=0, dead=[1, 2], min_ranks=2)
    with pytest.raises(PeerFailed, match=r"rank 1 \(process 1001\) died .* cannot go on with 1 rank: min_ranks=2\."):
        membership.agree(wait)


def test_a_rank_that_others_took_for_dead_does_not_go_on():
    membership, everyone, wait = members(3, own=1)
    everyone[0].decide(1, (0, 2))
    with pytest.raises(PeerFailed, match="gone on without rank 1"):
        membership.agree(wait)


def test_a_loss_is_a_failure_only_if_too_few_are_left():
    for min_ranks, lost, fails in ((0, (), True), (1, {1, 2}, False), (3, {1, 2}, True)):
        membership, _, _ = members(4, own=0, dead=[1, 2], min_ranks=min_ranks)
        assert membership._peers.lost() == frozenset(lost)
        assert (membership._peers.failure() is not None) == fails


class Seen:
    """What a wait asks, in order: who is lost, and who is missing."""

    def __init__(self, lost, missing, error=None):
        self.asked, self._lost, self._missing, self.aborted, self._error = [], lost, missing, False, error

    mesh = None

    def lost(self):
        self.asked.append("lost")
        return frozenset(self._lost.pop(0) if len(self._lost) > 1 else self._lost[0])

    def missing(self):
        self.asked.append("missing")
        return self._missing.pop(0) if len(self._missing) > 1 else self._missing[0]

    def check(self, communicator, missing, what):
        pass

    def members_lost(self, ranks):
        return MembersLost(f"ranks {ranks} died", ranks[0])


def test_a_wait_gives_up_only_when_all_that_are_missing_are_lost_and_looks_for_the_lost_first():
    seen = Seen(lost=[{1}, {1}, {1, 2}], missing=[[1, 3], [1, 3], [1]])
    with pytest.raises(MembersLost, match=r"ranks \[1\] died"):
        Wait("test", seen).until(lambda: False, seen.missing, lambda: "barrier()")
    assert seen.asked == ["lost", "missing"] * 3


def test_a_rank_that_arrived_before_it_died_is_not_missing():
    seen = Seen(lost=[{1}], missing=[[2]])
    Wait("test", seen).until(lambda: len(seen.asked) > 6, seen.missing, lambda: "barrier()")


def test_decisions_outlive_later_ones_of_other_views_in_shared_memory():
    own = Liveness.create(0)
    assert own.decision(1) is None
    own.decide(1, (0, 2, 500))
    assert own.decision(1) == (0, 2, 500)
    own.decide(2, (0, 500))
    assert own.decision(1) is None and own.decision(2) == (0, 500)
    own.fail(3, "a cause")
    assert own.root_cause == (3, "a cause") and own.decision(2) == (0, 500)
