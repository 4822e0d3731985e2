import json
import re

from typer.testing import CliRunner

from ring_plugins.cli.main import app
from ring_plugins.planning import counts, reference
from tests.documents import commands
from tests.launch import REPOSITORY


def test_json_and_a_picture(tmp_path):
    picture = tmp_path / "plan.png"
    said = CliRunner().invoke(
        app, ["plan", "--model", "vgg-16", "--network", "25gbit", "--per-host", "4", "--png", str(picture), "--json"]
    )
    assert said.exit_code == 0, said.output
    record = json.loads(said.output)
    assert [one["ranks"] for one in record["predictions"]] == list(counts(1024))
    assert record["predictions"][-1]["efficiency"] < record["predictions"][4]["efficiency"] < 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_profile_of_your_own(tmp_path):
    mine = tmp_path / "mine.json"
    reference("resnet-50").save(mine)
    said = CliRunner().invoke(app, ["plan", "--profile", str(mine), "-n", "16", "--step-ms", "100"])
    assert re.search(r"^16 ranks reach \d+\.\d%; 90% ", said.output, re.MULTILINE), said.output


def test_ranks_that_would_use_no_network_are_said_to_be_on_one_host():
    said = CliRunner().invoke(app, ["plan", "--model", "resnet-50", "--network", "10gbit", "-n", "8"]).output
    assert "All 8 ranks are assumed to be on one host (--per-host 8), where they use no network" in " ".join(
        said.split()
    )
    assert "not hidden: communication that backward does not hide" in " ".join(said.split())


def test_a_slow_network_gets_a_line_with_what_helps():
    arguments = ["plan", "--model", "resnet-50", "--network", "100mbit", "--transport", "ring", "-n", "16"]
    said = " ".join(CliRunner().invoke(app, arguments).output.split())
    assert re.search(
        r"This network moves 0\.1 Gbit/s: resnet-50 on 16 ranks would wait for it in \d+% of each step, with "
        r'compression="auto" \d+%, with sync_every=64 \d+% \(docs/slow_networks\.md\)\.',
        said,
    ), said
    gpus = " ".join(CliRunner().invoke(app, ["plan", "--model", "resnet-50", "--network", "1gbit"]).output.split())
    assert re.search(r'with compression="int8" \d+%, with sync_every=64 \d+%', gpus), gpus
    arguments[4] = "1000gbit"
    assert "would wait" not in CliRunner().invoke(app, arguments).output


def test_what_cannot_be_used_is_a_usage_error():
    for wrong in (["plan"], ["plan", "--model", "vgg"], ["plan", "--model", "vgg-16", "--network", "x"]):
        assert CliRunner().invoke(app, wrong).exit_code == 2


def test_the_commands_of_the_page_print_what_it_shows():
    page = (REPOSITORY / "docs" / "planning.md").read_text()
    (command,) = commands("docs/planning.md", "tests/cli/test_plan.py")
    (shown,) = re.search(rf"{re.escape(command)}\n```\n\n```text\n(.*?)\n```", page, re.DOTALL).groups()
    said = CliRunner().invoke(app, command.split()[1:])
    assert "\n".join(line.rstrip() for line in said.output.rstrip().splitlines()) == shown
