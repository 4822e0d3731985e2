"""Which variables ranks on other hosts get."""

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.launcher.environment import exported_variables


def test_variables_that_training_reads_are_exported():
    here = {
        "RING_TIMEOUT": "5", "NCCL_DEBUG": "INFO", "KERAS_BACKEND": "jax", "XLA_FLAGS": "", "PYTHONPATH": "/here",
        "HOME": "/root", "SSH_AUTH_SOCK": "/tmp/x", "RING_SPAWNED": "3:1:2:9", "MINE": "1",
    }  # fmt: skip
    found = exported_variables(["MINE", "YOURS=2"], 3, "eth0", here)
    assert found == {
        "KERAS_BACKEND": None, "NCCL_DEBUG": None, "PYTHONPATH": None, "RING_TIMEOUT": None, "XLA_FLAGS": None,
        "OMP_NUM_THREADS": "3", "RING_INTERFACE": "eth0", "NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0",
        "MINE": None, "YOURS": "2",
    }  # fmt: skip
    assert set(exported_variables([], 3, "10.2.0.0/16", {})) == {"OMP_NUM_THREADS", "RING_INTERFACE"}
    said_by_the_user = {"OMP_NUM_THREADS": "7", "NCCL_SOCKET_IFNAME": "ib0"}
    kept = exported_variables([], 3, "eth0", said_by_the_user)
    assert kept["OMP_NUM_THREADS"] is None
    assert kept["NCCL_SOCKET_IFNAME"] is None
    with pytest.raises(ArgumentError, match="-x NOWHERE: NOWHERE is not set here"):
        exported_variables(["NOWHERE"], 1, None, {})
