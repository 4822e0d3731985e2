import os
import traceback

import pytest

from ring_plugins.core.base.errors import PeerFailed, RingError
from ring_plugins.core.collectives.api import FailureState
from ring_plugins.core.control.wait import Wait


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
        assert (type(raised.value), str(raised.value), raised.value.rank) == (PeerFailed, str(first), 1)


def test_an_error_that_is_raised_again_and_again_does_not_grow():
    state, cause, frames = FailureState("ring"), OSError("unplugged"), set()
    wait = Wait("ring", None)
    wait.failure = state

    def fail():
        try:
            raise PeerFailed("rank 1 is gone", 1) from cause
        except PeerFailed as error:
            state.fail(error)
            raise

    with pytest.raises(PeerFailed):
        fail()
    for check in (state.check, wait._check_failure):
        for _ in range(1000):
            with pytest.raises(PeerFailed) as raised:
                check()
            frames.add(len(list(traceback.walk_tb(raised.value.__traceback__))))
            assert (raised.value.rank, raised.value.__cause__) == (1, cause)
    assert max(frames) <= 3
    assert state.error.__traceback__ is None  # which would keep the frames of the first caller alive


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
