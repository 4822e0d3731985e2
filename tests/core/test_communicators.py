"""The communicators of a job, in one of one rank."""

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.communicators import Communicators
from ring_plugins.core.members.policy import FailurePolicy

ENDS = FailurePolicy(False, 0)


def communicators(policy=ENDS, size=1):
    made = Communicators(policy, size, None)
    made.members = Members(0, [Member(0, 0)])
    return made


def test_a_new_communicator_needs_distinct_ranks_of_the_job():
    made = communicators()
    assert made.new_communicator("mine").ranks == (0,)
    for ranks in ([0, 0], [1], [-1]):
        with pytest.raises(ArgumentError, match="are not distinct ranks of a job of 1"):
            made.new_communicator("mine", ranks)


def test_a_communicator_may_be_made_while_the_monitor_thread_looks_at_them():
    """Which otherwise ended the job: "dictionary changed size during iteration"."""

    class Growing:
        looks = 0

        def values(self):
            self.looks += 1
            yield SingleCommunicator(f"{self.looks}")
            if self.looks == 1:
                raise RuntimeError("dictionary changed size during iteration")

    one = communicators()
    one._communicators = Growing()
    assert [communicator.name for communicator in one.in_use()] == ["2"]
    assert one.device_executors() == [] and one.activities() == [] and one.operations() == 0


def test_what_would_not_survive_a_loss_is_rejected_where_ranks_may_be_lost():
    communicators().refuse_to_recover("Keras")
    with pytest.raises(ArgumentError, match='Keras does not support on_failure="continue" yet'):
        communicators(FailurePolicy(True, 1), 2).refuse_to_recover("Keras")


def test_work_counts_that_was_done_in_a_communicator_that_is_gone():
    made = communicators()
    one = made.new_communicator("mine")
    one.statistics.operations += 1
    assert made.operations() == 1 and made.has_communicated()
    del one
    assert made.in_use() == [] and made.operations() == 1
