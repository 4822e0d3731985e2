"""Horovod's errors catch what is raised here."""

import pytest

import ring_plugins as ring
from ring_plugins.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt


@pytest.mark.parametrize("error", [ring.MismatchError("x"), ring.PeerFailed("x", 1), HorovodInternalError("x")])
def test_an_error_of_a_collective_is_horovods(error):
    with pytest.raises(HorovodInternalError):
        raise error


def test_an_interrupt_says_whether_states_are_equal():
    assert [HostsUpdatedInterrupt(True).skip_sync, HostsUpdatedInterrupt().skip_sync] == [True, False]
