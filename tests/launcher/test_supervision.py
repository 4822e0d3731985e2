"""Starting a process; `test_run.py` proves how processes end together."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux import process
from ring_plugins.core.rendezvous.slots import FOLLOWED, SlotOwner, Slots
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
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 3600.0)
    with Supervisor() as supervisor:
        stopped = supervisor.start(["sleep", "3600"], os.environ)
        stopped.send_signal(signal.SIGSTOP)
        while process.state(stopped.pid) != "T":
            time.sleep(0.01)
        supervisor.start(["sh", "-c", "exit 3"], os.environ)
        supervisor.wait()
        assert stopped.returncode == -signal.SIGKILL


@pytest.mark.parametrize("killed", ["kill -9 $$", "sh -c 'kill -9 $$'; exit $?"])  # also the command of a shell
def test_a_killed_process_ends_the_others_only_if_losses_are_not_tolerated(killed, monkeypatch):
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 0.0)
    for tolerates, status in ((True, 0), (False, 137)):
        with Supervisor(tolerates) as supervisor:
            supervisor.start(["sh", "-c", killed], os.environ).wait()
            going_on = supervisor.start(["sleep", "0.3" if tolerates else "3600"], os.environ)
            assert supervisor.wait()[0] == status
            assert going_on.returncode == (0 if tolerates else -signal.SIGKILL)
            assert supervisor.has_succeeded() == tolerates


def test_a_failed_process_ends_the_others_also_if_losses_are_tolerated(monkeypatch):
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 0.0)
    with Supervisor(recovers=True) as supervisor:
        supervisor.start(["sh", "-c", "kill -9 $$"], os.environ)
        supervisor.start(["sh", "-c", "exit 3"], os.environ)
        going_on = supervisor.start(["sleep", "3600"], os.environ)
        assert supervisor.wait()[0] == 3
        assert going_on.returncode == -signal.SIGKILL


def test_a_job_of_which_nobody_is_left_has_failed():
    with Supervisor(recovers=True) as supervisor:
        for _ in range(2):
            supervisor.start(["sh", "-c", "kill -9 $$"], os.environ)
        assert supervisor.wait()[0] == 137


def test_a_process_that_has_left_does_not_count():
    """Neither for the success of the job nor against it."""
    for others, status in (([0], 0), ([-9], 137)):
        with Supervisor(recovers=True) as supervisor:
            supervisor.is_out = lambda index: index == 0
            for code in (1, *others):
                ending = f"sys.exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code})"
                supervisor.start([sys.executable, "-c", f"import os, sys; {ending}"], os.environ)
            assert supervisor.wait() == (status, None)


def test_a_process_that_was_killed_since_memory_ran_out_is_named_as_such(monkeypatch):
    """As the kernel's counter says, which also counts others: so only of a process that ended when it rose."""
    kills, told = [7], []
    monkeypatch.setattr(supervision, "memory_kills", lambda: kills[0])
    with Supervisor(recovers=True) as supervisor:
        supervisor.tell_of_memory = told.append
        for ending in ("kill -9 $$", "exit 0", "kill -9 $$"):
            supervisor.start(["sh", "-c", ending], os.environ).wait()
            supervisor._note_ends()
            kills[0] = 8
        supervisor.wait()
        assert told == [2] and supervisor.silent_end(0) == "was killed by SIGKILL (out of memory? `kill -9`?)"
        assert supervisor.silent_end(2).startswith("was killed by SIGKILL, and may have been since memory ran out")


def test_of_processes_that_end_with_1_the_one_that_ended_first_is_known():
    with Supervisor() as supervisor:
        last = supervisor.start(["sleep", "3600"], os.environ)
        for status in (1, 3):
            supervisor.start(["sh", "-c", f"exit {status}"], os.environ).wait()
            supervisor._note_ends()
        last.terminate()
        assert supervisor.wait()[0] == 3  # the others may have ended because of this one
        assert supervisor.first_failure() == (2, 3)


def test_the_job_ends_as_the_process_did_because_of_which_the_others_ended():
    """A killed one tells nobody; one that says that it ended because of another is none, also if it was seen first."""
    for first, status in (("kill -9 $$", 137), ("exit 1", 1)):
        slots = Slots(np.zeros(Slots.nbytes(2), np.uint8))
        with Supervisor(slots=slots) as supervisor:
            slots.note_end(0, FOLLOWED)
            for end in ("kill -6 $$" if status == 1 else "exit 1", first):
                supervisor.start(["sh", "-c", end], os.environ).wait()
            assert supervisor.wait()[0] == status and supervisor.first_failure()[0] == 1


def test_a_rank_that_ended_without_a_word_is_lost_rather_than_a_failure():
    slots = Slots(np.zeros(Slots.nbytes(2), np.uint8))
    for slot in range(2):
        slots.take(SlotOwner(slot, slot, (1, 2, 3)), as_member=True)
    slots.note_end(1)
    supervisor = Supervisor(recovers=True, slots=slots)
    assert [supervisor.ends_job(slot, 3) for slot in range(2)] == [False, True]


def test_a_users_signal_reaches_the_ranks_and_no_login(tmp_path):
    script = "trap 'echo heard >> $0; exit' USR1; touch $0.$$; while :; do sleep 0.05; done"
    with Supervisor() as supervisor:
        for name, own_session in (("rank", False), ("login", True)):
            supervisor.start(["sh", "-c", script, str(tmp_path / name)], os.environ, own_session=own_session)
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert supervisor.processes[0].wait(20) == 0
        assert supervisor.processes[1].poll() is None
    assert [path.name for path in tmp_path.iterdir() if path.read_text()] == ["rank"]


def test_a_signal_that_the_launcher_has_ignored_ends_no_rank_that_does_not_handle_it(tmp_path):
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with Supervisor() as supervisor:
            supervisor.start(["sleep", "60"], os.environ)
            os.kill(os.getpid(), signal.SIGUSR1)
            with pytest.raises(subprocess.TimeoutExpired):
                supervisor.processes[0].wait(0.3)
    finally:
        signal.signal(signal.SIGUSR1, before)
