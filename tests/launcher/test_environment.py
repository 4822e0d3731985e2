"""Which variables ranks on other hosts get."""

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.launcher.environment import exported_variables, forget_outer_job


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


def test_a_job_that_a_rank_starts_does_not_have_the_options_of_the_job_of_the_rank():
    user = {"RING_TIMEOUT": "5", "RING_LAUNCHER": "single", "RING_MIN_RANKS": "2"}
    outside = {**user, "RING_SPAWNED": "3:1:2:9:2"}  # for mpirun, which hands on its whole environment
    assert forget_outer_job(outside) == "" and outside == user
    place = {"RING_LOSSES_TOLERATED": "1", "RING_JOINS": "5"}
    rank = {**user, **place, "RING_ON_FAILURE": "replace", "RING_MAX_RANKS": "4"}
    assert forget_outer_job(rank) == "RING_ON_FAILURE=replace RING_MIN_RANKS=2 RING_MAX_RANKS=4"
    assert rank == {"RING_TIMEOUT": "5", "RING_LAUNCHER": "single"}
    on_hosts = {"RING_LOSSES_TOLERATED": "1", "RING_SLOT": "3:2:0", "RING_LAUNCHER": "rendezvous"}
    assert forget_outer_job(on_hosts) == "" and not on_hosts
