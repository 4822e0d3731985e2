import os

import pytest

from ring_plugins.core.base.errors import PeerFailed, RingError
from ring_plugins.core.collectives.api import FailureState


def test_a_new_communicator_may_be_used():
    FailureState("ring").check()


def test_the_first_error_is_raised_ever_after():
    state, first = FailureState("ring"), PeerFailed("rank 1 is gone", 1)
    state.fail(first)
    state.fail(RingError("another"))
    state.close()
    for _ in range(2):
        with pytest.raises(PeerFailed) as raised:
            state.check()
        assert raised.value is first


def test_an_interruption_says_what_it_interrupted_and_what_to_do():
    state = FailureState("ring")
    state.interrupt("all_reduce", KeyboardInterrupt())
    with pytest.raises(RingError, match=r"ring was interrupted in all_reduce by KeyboardInterrupt .*shutdown\(\)"):
        state.check()


def test_a_closed_communicator_says_so():
    state = FailureState("ring")
    state.close()
    with pytest.raises(RingError, match="ring has been closed"):
        state.check()


def test_a_forked_child_learns_whose_the_communicator_is_even_after_an_error():
    state = FailureState("ring")
    state.fail(RingError("before"))
    state.detach_after_fork()
    with pytest.raises(RingError, match=f"belongs to process {os.getppid()}"):
        state.check()
