"""What scripts import of `horovod.common.util`."""

import os

import pytest

from ring_plugins import ArgumentError
from ring_plugins.horovod.common import util


def test_numbers_and_lists():
    assert [n for n in range(9) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert [util.is_iterable("x"), util.is_iterable(1)] == [True, False]
    assert [util.gloo_built(), util.mpi_built(), util.ddl_built()] == [True, True, False]
    assert not util.gpu_available("torch")
    assert util.is_version_greater_equal_than("2.13.0+cpu", "2.6.0") and not util.is_version_greater_equal_than(
        "2.6.0rc1", "2.6.0"
    )
    with pytest.raises(ArgumentError, match=r"major\.minor\.patch"):
        util.is_version_greater_equal_than("2.6.0", "2.6")


def test_variables_are_set_inside_the_block(monkeypatch):
    monkeypatch.setenv("RING_TEST_OLD", "old")
    with util.env(RING_TEST_OLD="new", RING_TEST_NEW="1", RING_TEST_NONE=None):
        assert [os.environ.get(f"RING_TEST_{name}") for name in ("OLD", "NEW", "NONE")] == ["new", "1", None]
    assert os.environ["RING_TEST_OLD"] == "old" and "RING_TEST_NEW" not in os.environ
