"""Starting a process; `test_run.py` proves how processes end together."""

import os
import signal
import time

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux import process
from ring_plugins.launcher import supervision
from ring_plugins.launcher.supervision import Supervisor


def test_a_script_without_an_interpreter_is_named(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("echo hello\n")
    script.chmod(0o755)
    with pytest.raises(LaunchError, match=r"train.sh cannot be run: Exec format error; does a script lack its #! line"):
        Supervisor().start([str(script)], os.environ)


def test_a_stopped_process_is_not_waited_for_after_a_failure(monkeypatch):
    """It can do nothing in the seconds that others use to report the failure."""
    monkeypatch.setattr(supervision, "_GRACE_SECONDS", 3600.0)
    with Supervisor() as supervisor:
        stopped = supervisor.start(["sleep", "3600"], os.environ)
        stopped.send_signal(signal.SIGSTOP)
        while process.state(stopped.pid) != "T":
            time.sleep(0.01)
        supervisor.start(["sh", "-c", "exit 3"], os.environ)
        supervisor.wait()
        assert stopped.returncode == -signal.SIGKILL
