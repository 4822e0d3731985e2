import json

import pytest
import typer

from ring_plugins.benchmarking import Curve, Times, sizes
from ring_plugins.cli.bench import size
from ring_plugins.core.base.errors import ArgumentError
from tests.launch import run_ranks

BENCH = """
from ring_plugins.cli.main import main
main()
"""


def test_sizes_have_both_ends():
    assert sizes(64, 5000) == [64, 256, 1024, 4096, 5000]
    assert sizes(64, 64) == [64]
    with pytest.raises(ArgumentError, match="factor=1"):
        sizes(64, 128, 1)
    assert [size(text) for text in ("12", "64K", "25MiB", "1 g")] == [12, 65536, 25 << 20, 1 << 30]
    with pytest.raises(typer.BadParameter):
        size("many")


def test_bandwidths_are_those_of_nccl_tests():
    curve = Curve(4, 1, {1_000_000: {"ring": Times(median=1e-3, low=1e-3, high=2e-3, least=0.5e-3)}})
    assert curve.algbw(1_000_000, "ring") == pytest.approx(1.0)
    assert curve.busbw(1_000_000, "ring") == pytest.approx(1.5)
    assert curve.busbw(1_000_000, "ring", least=True) == pytest.approx(3.0)
    (row,) = curve.record()["curve"]
    assert row["contestant"] == "ring" and row["algbw"] == pytest.approx(1.0)


def test_bench_grows_measures_and_draws(tmp_path):
    picture = tmp_path / "curves.png"
    options = ["--largest", "1K", "--smallest", "256", "--seconds", "0.01", "--json", "--png", str(picture)]
    result = run_ranks(BENCH, 2, "grown", args=["bench", "-n", "2", *options], timeout=180)
    record = json.loads(result.stdout)
    assert record["ranks"] == 2
    assert {row["bytes"] for row in record["curve"]} == {256, 1024}
    assert {row["contestant"] for row in record["curve"]} >= {"ring", "ring bucket", "plain copy", "gloo"}
    assert all(0 < row["least"] <= row["median"] for row in record["curve"])
    assert picture.read_bytes().startswith(b"\x89PNG")
