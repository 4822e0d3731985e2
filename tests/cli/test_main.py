import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ring_plugins import __version__
from ring_plugins.cli.main import app, forget_outer_job


def test_the_version():
    assert CliRunner().invoke(app, ["--version"]).stdout.split() == ["ring_plugins", __version__]


@pytest.mark.parametrize("command", ["run", "add-ranks", "doctor", "bench", "plan", "top"])
def test_every_command_has_help_with_examples(command):
    result = CliRunner().invoke(app, [command, "-h"])
    assert result.exit_code == 0 and f"ring {command}" in result.stdout
    assert "bool" not in result.stdout  # as typer calls an option that takes no value


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (["run", "-n", "x"], {}, ["-n", "'x' is not a whole number. Give one"]),
        (["run", "--on-failure", "go", "-n", "2"], {}, ["--on-failure", "'go' is not one of", "'replace'"]),
        (["run", "-n", "2"], {"RING_ON_FAILURE": "go"}, ["RING_ON_FAILURE", "'go' is not one of", "'replace'"]),
        (["run", "--min-ranks", "x"], {}, ["--min-ranks", "'x' is not a whole number. Give one"]),
        (["run"], {"RING_MIN_RANKS": "1.5"}, ["RING_MIN_RANKS", "'1.5' is not a whole number. Give one"]),
        (["run"], {"RING_MAX_RANKS": "many"}, ["RING_MAX_RANKS", "'many' is not a whole number. Give one"]),
        (["run"], {"RING_STANDBYS": "x"}, ["RING_STANDBYS", "'x' is not a whole number. Give one"]),
        (["run", "--spares", "x"], {}, ["--spares", "'x' is not a whole number. Give one"]),
        (["run"], {"RING_SPARES": "x"}, ["RING_SPARES", "'x' is not a whole number. Give one"]),
        (
            ["run", "-n", "2", "--on-failure", "continue"],
            {"RING_MIN_RANKS": "-1"},
            ["--min-ranks -1 is not between 1 and the 2 ranks of the job: change it, or RING_MIN_RANKS if"],
        ),
        (["add-ranks", "two"], {}, ["number", "'two' is not a whole number. Give one"]),
        (["add-ranks", "0"], {}, ["0 is not a number of ranks by which a job can grow: give how many, as in"]),
        (["add-ranks", "1000000"], {}, ["1000000 is not a number of ranks by which a job can grow: give how many"]),
        (["add-ranks", "2", "--job", "mine"], {}, ["--job", "'mine' is not a whole number. Give one"]),
        (["add-ranks", "2", "--job", "0"], {}, ["--job 0 is not the process id of a `ring run", "ask there"]),
        (["add-ranks", "2", "--host", "a b"], {}, ["--host 'a b' is not a host: give the name"]),
    ],
    ids=str,
)
def test_a_bad_value_is_named_with_its_argument_and_a_remedy(arguments, variables, named):
    program = ["true"] if arguments[0] == "run" else []
    result = CliRunner().invoke(app, [*arguments, *program], env=variables)
    output = " ".join(result.stderr.replace("\u2502", " ").split())  # typer draws a box, and breaks lines
    assert result.exit_code == 2 and all(text in output for text in named), output


@pytest.mark.parametrize("name", ["RING_STANDBYS", "RING_SPARES"])
def test_a_rank_may_start_another_job_of_its_own(name):
    """It has the options of its job as variables, of which --max-ranks contradicts the new job's."""
    outer = {"RING_LOSSES_TOLERATED": "1", "RING_ON_FAILURE": "replace", "RING_MAX_RANKS": "4", name: "1"}
    continues = "RING_ON_FAILURE=continue RING_LOSSES_TOLERATED=1"
    for options, policy in (["--with", "python"], ""), (["--on-failure", "continue"], continues):
        result = CliRunner().invoke(app, ["run", "--dry-run", "-n", "2", *options, "true"], env=outer)
        assert result.exit_code == 0 and policy in result.stdout, result.output
        assert "RING_MAX_RANKS" not in result.stdout and result.stdout.count("RING_ON_FAILURE") == bool(policy)
        assert f"ring run: RING_ON_FAILURE=replace RING_MAX_RANKS=4 {name}=1 of the job whose rank" in result.stderr


def test_the_command_starts_without_importing_frameworks():
    heavy = "{'torch', 'tensorflow', 'keras', 'jax', 'mpi4py', 'matplotlib'} & sys.modules.keys()"
    program = f"import sys; import ring_plugins.cli.main; print({heavy} or 'none')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "none"


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
