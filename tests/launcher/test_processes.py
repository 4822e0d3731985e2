"""Starting a process; `test_run.py` proves how processes end together."""

import os
import signal
import subprocess
import time

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux import process
from ring_plugins.launcher import processes
from ring_plugins.launcher.processes import Processes


def wait(of, find_trouble=lambda: None):
    """Wait for all that were started; the failure of one ends the others."""

    def running():
        return [one for one in of.started if one.poll() is None]

    return of.wait(running, lambda: "" if any(one.returncode for one in of.started) else find_trouble())


def test_a_script_without_an_interpreter_is_named(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("echo hello\n")
    script.chmod(0o755)
    with pytest.raises(LaunchError, match=r"train.sh cannot be run: Exec format error; does a script lack its #! line"):
        Processes().start([str(script)], os.environ)


def test_a_stopped_process_is_not_waited_for_after_a_failure(monkeypatch):
    """It can do nothing in the seconds that others use to report the failure."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 3600.0)
    with Processes() as group:
        stopped = group.start(["sleep", "3600"], os.environ)
        stopped.send_signal(signal.SIGSTOP)
        while process.state(stopped.pid) != "T":
            time.sleep(0.01)
        group.start(["sh", "-c", "exit 3"], os.environ)
        wait(group)
        assert stopped.returncode == -signal.SIGKILL


def test_processes_get_sigterm_if_the_job_is_in_trouble():
    with Processes() as group:
        one = group.start(["sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.05; done"], os.environ)
        time.sleep(0.3)
        assert wait(group, lambda: "nobody came") == "nobody came" and one.returncode == 7


def test_a_helper_outlives_the_job_and_no_process_of_the_job_does():
    with Processes() as group:
        helper = group.start(["sleep", "3600"], os.environ, is_helper=True)
        standby = group.start(["sleep", "3600"], os.environ)
        assert group.wait(list, lambda: None) is None
        assert standby.returncode == -signal.SIGKILL and helper.poll() is None
    assert helper.returncode == -signal.SIGKILL


def test_a_users_signal_reaches_the_ranks_and_no_login(tmp_path):
    script = "trap 'echo heard >> $0; exit' USR1; touch $0.$$; while :; do sleep 0.05; done"
    with Processes() as group:
        for name, own_session in (("rank", False), ("login", True)):
            group.start(["sh", "-c", script, str(tmp_path / name)], os.environ, own_session=own_session)
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert group.started[0].wait(20) == 0
        assert group.started[1].poll() is None
    assert [path.name for path in tmp_path.iterdir() if path.read_text()] == ["rank"]


def test_a_signal_that_the_launcher_has_ignored_ends_no_rank_that_does_not_handle_it(tmp_path):
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with Processes() as group:
            group.start(["sleep", "60"], os.environ)
            os.kill(os.getpid(), signal.SIGUSR1)
            with pytest.raises(subprocess.TimeoutExpired):
                group.started[0].wait(0.3)
    finally:
        signal.signal(signal.SIGUSR1, before)
