"""Versions that must agree, and integers in the environment."""

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.rendezvous.record import differences, integer, own_versions


def test_equal_versions_are_fine():
    assert differences({rank: (f"host{rank}", own_versions()) for rank in range(3)}) == ""


def test_different_versions_are_named_with_ranks_and_hosts():
    def versions(release):
        return {"ring_plugins": release, "Python": "3.11"}

    ranks = {rank: (f"host{rank}", versions("1.0" if rank == 0 else "1.1")) for rank in range(11)}
    text = differences(ranks)
    assert "ring_plugins is 1.0 on rank 0 on host0, but 1.1 on rank 1 on host1, " in text
    assert "rank 8 on host8 and 2 more. Install" in text and "Python" not in text


def test_an_integer_is_read_or_rejected_by_name(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "")
    assert (integer("RANK"), integer("WORLD_SIZE"), integer("NOT_SET_AT_ALL")) == (3, None, None)
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(LaunchError, match="RANK='three' is not an integer"):
        integer("RANK")
