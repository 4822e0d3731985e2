import pytest

from ring_plugins.benchmarking import Curve, Times, check_names, sizes
from ring_plugins.core.base.errors import ArgumentError


def test_sizes_include_both_ends():
    assert sizes(64, 5000) == [64, 256, 1024, 4096, 5000]
    assert sizes(64, 64) == [64]
    with pytest.raises(ArgumentError, match="factor=1"):
        sizes(64, 128, 1)


def test_bandwidths_are_those_of_nccl_tests():
    curve = Curve(4, 1, {1_000_000: {"ring": Times(median=1e-3, low=1e-3, high=2e-3, least=0.5e-3)}})
    assert curve.algbw(1_000_000, "ring") == pytest.approx(1.0)
    assert curve.busbw(1_000_000, "ring") == pytest.approx(1.5)
    assert curve.busbw(1_000_000, "ring", least=True) == pytest.approx(3.0)
    (row,) = curve.record()["curve"]
    assert row["backend"] == "ring" and row["algbw"] == pytest.approx(1.0)
    assert curve.job == "4 ranks on 1 host"


def test_unknown_backends_are_named_before_ranks_are_started():
    check_names(["ring", "plain copy"])
    with pytest.raises(ArgumentError, match="'rung' is not one of ring, ring bucket"):
        check_names(["ring", "rung"])
