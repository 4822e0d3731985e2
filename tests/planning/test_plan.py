"""The model behind `ring plan`: arithmetic that can be done by hand, known models, and Horovod's published jobs."""

import json
import math
import re
import statistics

import pytest
from typer.testing import CliRunner

from ring_plugins.cli.main import app
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.planning import (
    TRANSPORTS,
    Gradient,
    Network,
    Profile,
    Transport,
    counts,
    needed_gigabits,
    parse,
    predict,
    reference,
)
from ring_plugins.planning.network import fitted
from ring_plugins.planning.published import ROWS
from ring_plugins.planning.simulation import slowest_of
from tests.documents import commands
from tests.launch import REPOSITORY


def flat(gigabits=8.0, alpha=0.0):
    """1 GB/s between hosts."""
    return Network("flat", gigabits, Transport(1.0, alpha, 0.0, 1e6, True))


def profile(*ready, count=250_000, backward=0.010):
    """Parameters of 1 MB each; seconds at which their gradients are complete."""
    gradients = tuple(Gradient(f"p{i}", "float32", count, at) for i, at in enumerate(ready))
    return Profile("made up", 8, 0.005, backward, 0.001, gradients, "a test")


ALONE = BucketSizes(1, 1, None)  # every gradient is a bucket


def test_one_rank_is_alone():
    assert predict(profile(0.01), flat(), 1).efficiency == 1.0


def test_communication_hides_behind_backward_but_for_what_is_ready_last():
    # Two hosts: 1 MB takes 1 ms. The last layer's gradient leaves at 2 ms and is through before the first's at 10 ms.
    found = predict(profile(0.010, 0.002), flat(), 2, 1, ALONE, jitter=0.0)
    assert found.exposed == pytest.approx(0.001, rel=1e-3)
    assert found.communication == pytest.approx(0.002, rel=1e-3)
    assert found.step == pytest.approx(0.017, rel=1e-3)


def test_without_a_core_to_spare_nothing_hides():
    found = predict(profile(0.010, 0.002), flat(), 2, 1, ALONE, jitter=0.0, overlap=False)
    assert found.exposed == pytest.approx(0.002, rel=1e-3)


def test_buckets_leave_in_order_and_one_after_the_other():
    found = predict(profile(0.001, 0.001, 0.009), flat(), 2, 1, ALONE, jitter=0.0)
    assert found.exposed == pytest.approx(0.002, rel=1e-3)  # 9 to 10, then two more
    slow = predict(profile(0.010, 0.002), flat(gigabits=0.8), 2, 1, ALONE, jitter=0.0)
    assert slow.exposed == pytest.approx(0.012, rel=1e-2)  # 2 + 10 + 10 - 10 ms


def test_all_reduce_costs_what_the_algorithm_sends():
    megabyte = 1_000_000
    assert flat().all_reduce(megabyte, 4, 1) == pytest.approx(1.5e-3)
    assert flat(alpha=1e-3).all_reduce(0, 4, 1) == pytest.approx(6e-3)
    two_level = Network("", 8.0, Transport(1.0, 0.0, 0.0, 2.0, True))
    assert two_level.all_reduce(megabyte, 4, 2) == pytest.approx(0.5e-3 + 1e-3)  # inside, then between two hosts
    ring = Network("", 8.0, Transport(1.0, 0.0, 0.0, 2.0, False))
    assert ring.all_reduce(megabyte, 4, 2) == pytest.approx(1.5e-3)
    assert ring.all_reduce(megabyte, 2, 2) == pytest.approx(0.5e-3)  # one host


def test_the_slowest_of_many():
    assert slowest_of(1) == 0
    assert slowest_of(2, 0.01) == pytest.approx(0.0056, rel=0.06)  # 1 / sqrt(pi)
    assert slowest_of(1000, 0.01) == pytest.approx(0.0324, rel=0.02)


def test_the_network_that_is_needed():
    needed = needed_gigabits(profile(0.010), flat(), 2, 1, 0.9)
    reached = predict(profile(0.010), flat(needed), 2).efficiency
    assert 0.9 <= reached < 0.905
    assert math.isinf(needed_gigabits(profile(0.010), flat(alpha=1.0), 2))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("inception-v3", 23_834_568),
        ("resnet-50", 25_557_032),
        ("resnet-101", 44_549_160),
        ("vgg-16", 138_357_544),
        ("gpt2-small", 124_439_808),
    ],
)
def test_reference_models_have_the_parameters_of_their_papers(name, parameters):
    made = reference(name)
    assert made.nbytes == 4 * parameters
    readies = [gradient.ready for gradient in made.gradients]
    assert readies == sorted(readies, reverse=True)
    assert max(readies) == pytest.approx(made.backward)
    assert made.at_step(2 * made.step).gradients[0].ready == pytest.approx(2 * readies[0])


def test_predictions_of_horovods_published_jobs():
    errors = [abs(row.error) for row in ROWS]
    assert statistics.median(errors) < 0.05
    assert statistics.median(abs(row.error) for row in ROWS if not row.calibrates) < 0.05
    assert max(errors) < 0.20


def test_the_errors_in_the_documentation_are_these():
    page = (REPOSITORY / "docs" / "planning.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\d+) \| .* \| ([+-][\d.]+) % \|", page, re.MULTILINE)
    assert [(row.model, str(row.ranks), f"{100 * row.error:+.1f}") for row in ROWS] == rows


def test_networks_by_rate_name_and_measurement(tmp_path):
    assert parse("25gbit", "rdma").gigabits == 25
    assert parse("800 mbit").gigabits == pytest.approx(0.8)
    assert parse("ib-hdr").gigabits == 200
    assert parse("25gbit").inside(100).transport.local_gbytes == 100
    points = [(size, 2 * 50e-6 + size / 1e9) for size in (64, 4096, 1 << 20, 1 << 24)]
    found = fitted("", points, ranks=2, hosts=2)
    assert found.gigabits == pytest.approx(8.0, rel=1e-3)
    assert found.transport.alpha == pytest.approx(50e-6, rel=1e-3)
    rows = [{"bytes": size, "median": seconds, "contestant": "ring"} for size, seconds in points]
    (tmp_path / "bench.json").write_text(json.dumps({"ranks": 2, "nodes": 2, "curve": rows}))
    (tmp_path / "doctor.json").write_text(json.dumps({"all_reduce": {"ranks": 2, "nodes": 2, "curve": rows}}))
    for name in ("bench", "doctor"):
        assert parse(str(tmp_path / f"{name}.json")) == parse(str(tmp_path / "bench.json"))
    (tmp_path / "one.json").write_text(json.dumps({"ranks": 2, "nodes": 1, "curve": rows}))
    for wrong, said in (("fast", "is no rate"), (str(tmp_path / "one.json"), "on 1 host"), ("0gbit", "is no rate")):
        with pytest.raises(ArgumentError, match=said):
            parse(wrong)
    with pytest.raises(ArgumentError, match="pigeons"):
        parse("25gbit", "pigeons")


def test_the_command(tmp_path):
    picture = tmp_path / "plan.png"
    said = CliRunner().invoke(
        app, ["plan", "--model", "vgg-16", "--network", "25gbit", "--per-host", "4", "--png", str(picture), "--json"]
    )
    assert said.exit_code == 0, said.output
    record = json.loads(said.output)
    assert [one["ranks"] for one in record["predictions"]] == list(counts(1024))
    assert record["predictions"][-1]["efficiency"] < record["predictions"][4]["efficiency"] < 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    mine = tmp_path / "mine.json"
    reference("resnet-50").save(mine)
    assert Profile.load(mine) == reference("resnet-50")
    said = CliRunner().invoke(app, ["plan", "--profile", str(mine), "-n", "16", "--step-ms", "100"])
    assert re.search(r"^16 ranks reach \d+\.\d%; 90% ", said.output, re.MULTILINE), said.output
    for wrong in (["plan"], ["plan", "--model", "vgg"], ["plan", "--model", "vgg-16", "--network", "x"]):
        assert CliRunner().invoke(app, wrong).exit_code == 2
    assert set(TRANSPORTS) == {"rdma", "tcp", "cpu", "ring"}


def test_the_commands_of_the_page_print_what_it_shows():
    page = (REPOSITORY / "docs" / "planning.md").read_text()
    (command,) = commands("docs/planning.md", "tests/planning/test_plan.py")
    (shown,) = re.search(rf"{re.escape(command)}\n```\n\n```text\n(.*?)\n```", page, re.DOTALL).groups()
    said = CliRunner().invoke(app, command.split()[1:])
    assert "\n".join(line.rstrip() for line in said.output.rstrip().splitlines()) == shown
