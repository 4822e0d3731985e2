import json

import pytest
import typer
from typer.testing import CliRunner

from ring_plugins.cli.bench import parse_size
from ring_plugins.cli.main import app
from tests.launch import run_ranks

BENCH = """
from ring_plugins.cli.main import main
main()
"""
QUICK = ["--largest", "1K", "--smallest", "256", "--seconds", "0.01"]


def test_sizes_as_users_write_them():
    assert [parse_size(text) for text in ("12", "64K", "25MiB", "1 g")] == [12, 65536, 25 << 20, 1 << 30]
    with pytest.raises(typer.BadParameter):
        parse_size("many")


@pytest.mark.parametrize("option", ["--memory", "--plane"])
def test_one_rank_is_measured_and_the_former_option_is_accepted(option):
    result = CliRunner().invoke(app, ["bench", "-n", "1", option, "host", "--with", "ring,plain copy", *QUICK])
    assert result.exit_code == 0, result.output
    assert "1 rank on 1 host" in result.stdout
    assert "plain copy" in result.stdout


def test_only_the_new_option_is_in_the_help():
    text = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"}).stdout
    assert "--memory" in text and "--plane" not in text


def test_what_cannot_be_measured_is_a_usage_error():
    for wrong in (["--with", "pigeons"], ["--largest", "many"], ["--largest", "1"]):
        assert CliRunner().invoke(app, ["bench", *wrong]).exit_code == 2


def test_it_starts_ranks_measures_all_backends_and_draws(tmp_path):
    picture = tmp_path / "curves.png"
    arguments = ["bench", "-n", "2", *QUICK, "--json", "--png", str(picture)]
    record = json.loads(run_ranks(BENCH, 2, "spawned", args=arguments, timeout=180).stdout)
    assert record["ranks"] == 2
    assert {row["bytes"] for row in record["curve"]} == {256, 1024}
    assert {row["backend"] for row in record["curve"]} >= {"ring", "ring bucket", "plain copy", "gloo"}
    assert all(0 < row["least"] <= row["median"] for row in record["curve"])
    assert picture.read_bytes().startswith(b"\x89PNG")
