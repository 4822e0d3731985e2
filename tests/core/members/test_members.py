"""How one process follows changes of the members, whatever begins them; the agreement itself is a stand-in."""

import pytest

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.members.members import Elastic
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.members.preemption_notice import TERMINATED
from ring_plugins.core.rendezvous.slots import State


class Detector:
    aborted = False


class Communicator:
    """Of all ranks; each has the same to say."""

    def __init__(self, told=()):
        self.told, self.kept, self.interrupted = list(told), [], []

    def keep(self, ranks, view):
        self.kept.append((tuple(ranks), view))

    def all_gather_object(self, own, operation):
        return [own, *self.told]

    def interrupt(self, operation, cause):
        self.interrupted.append((operation, cause))


class Mesh:
    """Decides what the test says, or raises it."""

    confirms = False

    def __init__(self, members, decision):
        self._members, self._decision, self.joined = members, decision, []

    def agree(self, wait, leaving, joining):
        if isinstance(self._decision, Exception):
            raise self._decision
        gone = self._decision
        if gone is not None and self._members.own not in gone:
            self._members.follow([rank for rank in self._members.ranks if rank not in gone], self._members.view + 1)
        return gone

    def note_joined(self, rank):
        self.joined.append(rank)


class Job:
    is_joining, channel, observers, finished = False, None, None, 5

    def __init__(self, communicator):
        self.communicator, self.failure_detector = communicator, Detector()

    def recovering_communicators(self):
        return {0: self.communicator}

    def operations(self):
        return self.finished

    def exit_from_job(self, status):
        raise SystemExit(status)


class Slot:
    def __init__(self):
        self.lost, self.states = [], []

    def note(self, state):
        self.states.append(state)

    def note_lost(self, rank):
        self.lost.append(rank)


@pytest.fixture
def make():
    def make_one(own=1, decision=(), told=(), min_ranks=1):
        members = Members(own, [Member(rank, rank, "host", 10 + rank, "host", "host") for rank in range(3)])
        job = Job(Communicator(told))
        elastic = Elastic(job, members, None, FailurePolicy(True, min_ranks), Slot())
        elastic.mesh = Mesh(members, list(decision) if isinstance(decision, tuple) else decision)
        return elastic, job, members

    return make_one


def test_everything_follows_a_loss_and_the_script_is_told_later(make):
    elastic, job, members = make(decision=(0,))
    elastic.agree(Wait("ring", None))
    assert (members.ranks, elastic.view, members.topology.rank) == ((1, 2), 1, 0)
    assert job.communicator.kept == [((1, 2), 1)] and elastic.slot.lost == [0]
    told = []
    elastic.add_change_callback(told.append)
    elastic.tell_changes()
    (change,) = told
    assert (change.lost, change.rank_before, change.size_before, change.rank, change.size) == ((0,), 1, 3, 0, 2)
    elastic.tell_changes()
    assert len(told) == 1


@pytest.mark.parametrize(("decision", "in_operation", "kept"), [((), True, 1), ((), False, 0), (None, True, 0)])
def test_without_a_loss_only_an_operation_that_was_given_up_goes_on_in_the_next_view(
    make, decision, in_operation, kept
):
    elastic, job, _ = make(decision=decision)
    elastic.agree(Wait("ring", None) if in_operation else None)
    assert len(job.communicator.kept) == kept and not elastic.changes.untold


def test_a_rank_that_the_others_go_on_without_ends_by_its_failure(make):
    elastic, job, _ = make(decision=PeerFailed("the job goes on without rank 1.", 0))
    with pytest.raises(PeerFailed, match="without rank 1"):
        elastic.agree(Wait("ring", None))
    assert job.failure_detector.aborted and not job.communicator.kept


def test_a_rank_that_was_told_to_end_leaves_with_status_0_and_the_others_are_told(make):
    elastic, job, _ = make(decision=(1,), told=[(None, set(), False), (None, set(), False)])
    elastic.preemption_notice.given = True
    with pytest.raises(SystemExit) as ended:
        elastic.change_members()
    assert ended.value.code == 0 and elastic.slot.states == [State.LEFT] and not job.communicator.kept
    elastic, job, members = make(decision=(0, 2), told=[(0, set(), False), (None, set(), False)])
    elastic.change_members()  # rank 2 dies meanwhile
    assert members.ranks == (1,) and elastic.slot.lost == [2]
    assert (elastic.changes.untold[0].lost, elastic.changes.untold[0].left) == ((2,), (0,))


def test_all_end_if_too_few_would_be_left(make):
    elastic, _, _ = make(told=[(0, set(), False), (None, set(), False)], min_ranks=3)
    with pytest.raises(SystemExit) as ended:
        elastic.change_members()
    assert ended.value.code == TERMINATED


@pytest.mark.parametrize("why", ["too few", "of the job", "no losses"])
def test_a_script_that_asks_gets_the_answer_that_the_job_ends_instead(make, why):
    told = {"too few": [(0, set(), False), (None, set(), False)], "of the job": [(None, set(), False)]}.get(why, [])
    elastic, _, members = make(told=told, min_ranks=3 if why == "too few" else 1)
    elastic.preemption_notice.is_asked = True
    elastic.preemption_notice.of_job = why == "of the job"
    if why == "no losses":
        elastic.mesh = None
    elastic.change_members()
    assert elastic.is_ending and not elastic.wants_change and members.ranks == (0, 1, 2)
    assert elastic.is_preempted()  # without a word to the others


def test_a_rank_that_is_a_group_of_its_own_waits_for_no_others_answer(make):
    elastic, job, _ = make()
    elastic.mesh, elastic.widest, job.communicator = None, 1, None
    assert not elastic.is_preempted()
    elastic.preemption_notice.given = True
    assert elastic.is_preempted()


def test_who_waits_to_join_is_noted_by_all(make):
    elastic, job, _ = make(told=[(None, {7}, False), (None, {0}, False)])
    elastic.change_members()
    assert elastic.pending == {0, 7} and elastic.is_pending and not job.communicator.kept


def test_a_function_of_the_script_that_raises_breaks_the_communicator(make):
    elastic, job, _ = make(decision=(0,))
    elastic.add_change_callback(lambda change: 1 / 0)
    elastic.agree(Wait("ring", None))
    with pytest.raises(ZeroDivisionError):
        elastic.tell_changes()
    ((operation, cause),) = job.communicator.interrupted
    assert "on_membership_change" in operation and isinstance(cause, ZeroDivisionError)


def test_a_process_that_has_just_joined_hears_of_its_join_in_a_function_that_it_adds_then(make):
    elastic, job, members = make(own=2)
    members.follow([0, 1, 2], 1)
    elastic.follow_joined([2])
    assert elastic.mesh.joined == []  # nobody watches itself
    elastic.tell_changes()
    told = []
    elastic.add_change_callback(told.append)
    assert [change.joined for change in told] == [(2,)]
    job.finished += 1
    elastic.add_change_callback(told.append)
    assert len(told) == 1, "its script has gone on"
