"""Starting a process; `test_run.py` proves how processes end together."""

import os

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.launcher.supervision import Supervisor


def test_a_script_without_an_interpreter_is_named(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("echo hello\n")
    script.chmod(0o755)
    with pytest.raises(LaunchError, match=r"train.sh cannot be run: Exec format error; does a script lack its #! line"):
        Supervisor().start([str(script)], os.environ)
