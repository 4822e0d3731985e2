import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ring_plugins import __version__
from ring_plugins.cli.main import app


def test_the_version():
    assert CliRunner().invoke(app, ["--version"]).stdout.split() == ["ring_plugins", __version__]


@pytest.mark.parametrize("command", ["run", "add-ranks", "doctor", "bench", "plan"])
def test_every_command_has_help_with_examples(command):
    result = CliRunner().invoke(app, [command, "-h"])
    assert result.exit_code == 0 and f"ring {command}" in result.stdout


def test_a_rank_may_start_another_job_of_its_own():
    """It has the options of its job as variables, of which --max-ranks contradicts the new job's."""
    outer = {"RING_LOSSES_TOLERATED": "1", "RING_ON_FAILURE": "replace", "RING_MAX_RANKS": "4", "RING_SPARES": "1"}
    continues = "RING_ON_FAILURE=continue RING_LOSSES_TOLERATED=1"
    for options, policy in (["--with", "python"], ""), (["--on-failure", "continue"], continues):
        result = CliRunner().invoke(app, ["run", "--dry-run", "-n", "2", *options, "true"], env=outer)
        assert result.exit_code == 0 and policy in result.stdout, result.output
        assert "RING_MAX_RANKS" not in result.stdout and result.stdout.count("RING_ON_FAILURE") == bool(policy)
        assert "ring run: RING_ON_FAILURE=replace RING_MAX_RANKS=4 RING_SPARES=1 of the job whose rank" in result.stderr


def test_the_command_starts_without_importing_frameworks():
    heavy = "{'torch', 'tensorflow', 'keras', 'jax', 'mpi4py', 'matplotlib'} & sys.modules.keys()"
    program = f"import sys; import ring_plugins.cli.main; print({heavy} or 'none')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "none"
