"""The test harness itself notices failures, hangs, and whatever a launch leaves behind."""

import signal
from pathlib import Path

import pytest

from tests.launch import LaunchFailed, hear_interrupts, run_ranks, start_ranks

SAY = """
import os
from tests.worker import report
rank = next((int(os.environ[n]) for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK") if n in os.environ), 0)
report("where", [rank, os.environ["TEST_RANKS"]], rank=rank)
"""


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_every_rank_reports(launcher, ranks):
    result = run_ranks(SAY, ranks, launcher)
    assert result.values("where") == [[rank, str(ranks)] for rank in range(ranks)]


def test_a_status_other_than_zero_fails_with_the_output():
    with pytest.raises(LaunchFailed, match="(?s)status 3.*last words"):
        run_ranks("print('last words'); raise SystemExit(3)")
    assert run_ranks("raise SystemExit(3)", check=False).returncode == 3


def test_a_time_out_shows_where_each_process_waits():
    with pytest.raises(LaunchFailed, match="(?s)still running.*stacks of pid.*in wait_here"):
        run_ranks("import time\ndef wait_here():\n    time.sleep(600)\nwait_here()", timeout=1)


def test_a_launch_may_take_longer_where_processes_wait_for_processors(monkeypatch):
    monkeypatch.setattr("tests.launch.os.getloadavg", lambda: (1e6, 0.0, 0.0))
    run_ranks("import time; time.sleep(0.5)", timeout=0.1)
    monkeypatch.setattr("tests.launch.os.getloadavg", lambda: (0.0, 0.0, 0.0))
    with pytest.raises(LaunchFailed, match="still running"):
        run_ranks("import time; time.sleep(600)", timeout=0.1)


def test_ranks_hear_ctrl_c_although_a_shell_ignores_it_for_what_it_starts_in_the_background():
    script = "import signal; from tests.worker import report; report('handler', str(signal.getsignal(signal.SIGINT)))"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        hear_interrupts()
        assert "default_int_handler" in run_ranks(script, 1).reports[0]["handler"]
    finally:
        signal.signal(signal.SIGINT, before)


ORPHAN = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
"""


def test_a_process_left_alive_is_found_and_ended(monkeypatch):
    monkeypatch.setattr("tests.launch.GRACE_SECONDS", 0.2)
    with start_ranks(ORPHAN) as job:
        with pytest.raises(LaunchFailed, match="(?s)left alive.*time.sleep"):
            job.wait()
        assert job.processes() == []


@pytest.mark.parametrize("name", ["$TMPDIR/ring_left", "/dev/shm/anything_left"])
def test_a_file_left_behind_is_found(name, monkeypatch):
    monkeypatch.setattr("tests.launch.FILE_SECONDS", 0.1)
    script = f"""
    import mmap, os, time
    with open(os.path.expandvars({name!r}), "wb+") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
        time.sleep(0.6)
    """
    try:
        with pytest.raises(LaunchFailed, match="files left behind: .*_left"):
            run_ranks(script)
    finally:
        Path(name).unlink(missing_ok=True)


def test_one_rank_can_be_signalled():
    with start_ranks(
        """
        import os, time
        from tests.worker import report
        report("pid", os.getpid(), rank=0)
        time.sleep(60)
        """,
        ranks=1,
    ) as job:
        job.send_signal(0, signal.SIGKILL)
        assert job.wait(10).returncode == -signal.SIGKILL


def test_the_semaphores_of_killed_processes_are_removed():
    script = """
        import multiprocessing, time
        from tests.worker import report

        if __name__ == "__main__":
            lock = multiprocessing.get_context("spawn").Lock()
            report("name", lock._semlock.name)
            time.sleep(600)
    """
    with start_ranks(script, 1) as job:
        file = Path(f"/dev/shm/sem.{job.wait_for('name')[0].removeprefix('/')}")
        assert file.exists()
    assert not file.exists()
