import pytest

from ring_plugins.benchmarking import check_names
from ring_plugins.core.base.errors import ArgumentError


def test_unknown_backends_are_named_before_ranks_are_started():
    check_names(["ring", "plain copy"])
    with pytest.raises(ArgumentError, match="'rung' is not one of ring, ring bucket"):
        check_names(["ring", "rung"])
