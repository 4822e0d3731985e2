"""Options of `horovodrun` mean the same under `ring run`, or are named once with what to do instead."""

import re
import sys

import pytest
import typer
from typer.testing import CliRunner

from ring_plugins.cli.horovodrun import OPTIONS, REFUSED, translate
from ring_plugins.cli.main import app
from ring_plugins.core.base import config
from ring_plugins.launcher import job, launch_plan
from ring_plugins.launcher.hosts import Host

#: All that the parser of horovodrun 0.28 has, apart from -h.
ALL = """
-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces --network-interface
--output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file --fusion-threshold-mb --cycle-time-ms
--cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune --autotune-log-file
--autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
--autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout
--reset-limit --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles
--no-stall-check --stall-check --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds
--mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity
--gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp -prefix-timestamp
--prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H --hosts -hostfile --hostfile
--host-discovery-script --gloo --mpi --jsrun
"""
HAS_VALUE = {"-n": True, "-np": True, "--ranks": True, "-x": True, "--tag-output": False, "--agent": True}


@pytest.fixture
def plan(monkeypatch):
    """Runs `ring run` with options; returns the plan of the job, and what was said."""

    def run(*options):
        found = []
        monkeypatch.setattr(job, "run", lambda plan, notify: found.append(plan) or 0)
        result = CliRunner().invoke(app, ["run", *options, "--no-check", "true"])
        assert result.exit_code == 0, result.output
        return found[0], result.stderr

    return run


def test_every_option_of_horovodrun_is_known():
    own = {name for command in [typer.main.get_command(app)] for name in _options_of(command.commands["run"])}
    assert {*ALL.split()} - {*own, *OPTIONS, *REFUSED, "--config-file"} == set()


def _options_of(command):
    return [name for param in command.params for name in param.opts]


def test_what_replaces_an_option_exists():
    own = {*_options_of(typer.main.get_command(app).commands["run"])}
    for name, option in OPTIONS.items():
        assert bool(option.ours) + bool(option.variable) + bool(option.instead) == 1, name
        assert not option.ours or option.ours in own
        assert not option.variable or not config.ALL[option.variable].problem({option.variable: option.value or "7"})
        for variable in re.findall(r"RING_\w+", option.instead):
            assert variable in config.ALL, name
        for mentioned in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", option.instead):
            assert mentioned in own, name


def test_options_become_ours(plan):
    found, said = plan("--num-proc", "3", "--min-np", "2", "--max-np=5", "--network-interface", "lo", "--verbose")
    assert (found.job.ranks, found.replaces, found.max_ranks) == (3, True, 5)
    assert found.job.environment["RING_MIN_RANKS"] == "2" and found.job.interface == "lo"
    assert said.count("--verbose has no effect here: the command") == 1


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("-np 2 -hostfile h python t.py --num-proc 5", "-np 2 --hostfile h python t.py --num-proc 5"),
        ("--network-interface a --network-interfaces=b,c t", "--interface a,b,c t"),
        ("--mpi-args=-q --binding-args --bind t", "--mpirun-options|-q --bind|t"),
        ("--stall-check-warning-time-seconds 9 t", "-x RING_STALL_WARNING=9 t"),
        ("--stall-check-shutdown-time-seconds 0 t", "t"),
        ("--no-autotune --tcp t", "-x RING_AUTOTUNE=0 -x RING_TRANSPORT=tcp t"),
        ("--mpi t", "--with mpirun t"),
        ("-p 22 -i key t", "--agent|ssh -o BatchMode=yes -o ConnectTimeout=8 -p 22 -i key|t"),
        ("-p 22 --agent rsh t", "--agent rsh t"),
        ("--min-num-proc 1 --on-failure continue t", "--min-ranks 1 --on-failure continue t"),
        ("--tag-output -- --mpi", "--tag-output -- --mpi"),
        ("--output-filename out -n2 t", "--output-dir out -n2 t"),
    ],
)
def test_translation(words, found):
    expected = found.split("|") if "|" in found else found.split()
    assert translate(words.split(), {**HAS_VALUE, "--on-failure": True}, {}) == (expected, [])


def test_a_variable_that_says_what_happens_to_lost_ranks_counts():
    assert translate(["--min-np", "1", "t"], HAS_VALUE, {"RING_ON_FAILURE": "continue"}) == (
        ["--min-ranks", "1", "t"],
        [],
    )


def test_an_option_without_effect_takes_its_words():
    words, said = translate(["--blacklist-cooldown-range", "1", "2", "--gloo", "t"], HAS_VALUE, {})
    assert words == ["t"] and [one.split(" has no effect")[0] for one in said] == [
        "--blacklist-cooldown-range 1 2",
        "--gloo",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--check-build", "write `ring doctor`"),
        ("--config-file /nowhere.yaml t", "--config-file /nowhere.yaml cannot be read: .*No such file"),
        ("--num-proc", "needs a value"),
    ],
)
def test_what_would_mean_something_else_is_refused(words, said):
    with pytest.raises(typer.BadParameter, match=said):
        translate(words.split(), HAS_VALUE, {})


CONFIG = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms:
  hierarchical_allreduce: false
autotune: {enabled: true, log_file: log.csv}
timeline: {filename: t.json, mark_cycles: true}
stall_check: {enabled: true, warning_time_seconds: 120, shutdown_time_seconds: 0}
library_options: {num_nccl_streams: 2}
logging: {level: INFO, with_timestamp: false}
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        file = tmp_path / "config.yaml"
        file.write_text(text)
        return str(file)

    return write


def test_the_settings_of_a_file_become_options_before_those_of_the_command_line(written):
    pytest.importorskip("yaml")
    words, said = translate(["--config-file", written(CONFIG), "--no-autotune", "t"], HAS_VALUE, {})
    of_file = ["RING_AUTOTUNE=1", "RING_STALL_WARNING=60", "RING_STALL_WARNING=120"]
    assert words == [word for one in [*of_file, "RING_AUTOTUNE=0"] for word in ("-x", one)] + ["t"]
    assert [one.split(" has no effect")[0] for one in said] == [
        "--gloo", "--fusion-threshold-mb 32", "--no-hierarchical-allreduce", "--autotune-log-file log.csv",
        "--timeline-filename t.json", "--timeline-mark-cycles", "--num-nccl-streams 2", "--log-level INFO",
        "--log-without-timestamp",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("params: {fusion: 3}", "horovodrun knows no params: fusion; write it as an option"),
        ("hosts: a:2", "knows no hosts: a:2"),
        ("- params", r"knows no : \['params'\]"),
        ("params: {", "cannot be read: while"),
    ],
)
def test_a_file_with_what_horovodrun_does_not_know_is_refused(written, text, said):
    pytest.importorskip("yaml")
    with pytest.raises(typer.BadParameter, match=said):
        translate([f"--config-file={written(text)}", "t"], HAS_VALUE, {})


def test_a_section_whose_settings_are_all_comments_says_nothing(written):
    pytest.importorskip("yaml")
    text = "params:\n  # cycle_time_ms: 5\nautotune:\n"
    assert translate([f"--config-file={written(text)}", "t"], HAS_VALUE, {}) == (["t"], [])


def test_a_file_needs_pyyaml(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(typer.BadParameter, match="needs PyYAML: pip install pyyaml, or write its settings as options"):
        translate(["--config-file", written("")], HAS_VALUE, {})


def test_a_discovery_script_means_that_ranks_are_replaced(plan, monkeypatch):
    monkeypatch.setattr(launch_plan, "first_hosts", lambda script, least, notify: [Host("localhost", least + 1)])
    found, _ = plan("--host-discovery-script", "./hosts.sh", "--min-np", "3", "--max-np", "9")
    assert (found.job.ranks, found.max_ranks, found.replaces, found.host_discovery) == (4, 9, True, "./hosts.sh")
    assert found.hosts == ("localhost",), "so that other hosts may join"
