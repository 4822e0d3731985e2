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


def test_the_command_starts_without_importing_frameworks():
    heavy = "{'torch', 'tensorflow', 'keras', 'jax', 'mpi4py', 'matplotlib'} & sys.modules.keys()"
    program = f"import sys; import ring_plugins.cli.main; print({heavy} or 'none')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "none"
