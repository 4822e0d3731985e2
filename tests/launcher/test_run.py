"""`ring run` with real ranks on this host: it starts them, prints, and ends everything, whatever ends first."""

import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from tests.documents import commands
from tests.launch import run_ranks, start_ranks

RING = str(Path(sys.executable).parent / "ring")
STARTERS = [pytest.param("mpirun", marks=pytest.mark.mpi), "python"]


def ring_run(*options: str) -> list[str]:
    return [RING, "run", *options, sys.executable]


WHO = """
    import os, sys
    import numpy as np, ring_plugins as ring
    from tests.worker import report
    ring.init()
    report("who", [ring.size(), float(ring.all_reduce(1.0, ring.SUM)), os.environ["OMP_NUM_THREADS"], sys.argv[1:]])
    print("rank", ring.rank(), "speaks")
"""


@pytest.mark.parametrize("starter", STARTERS)
def test_ranks_arguments_and_tagged_lines(starter):
    front = ring_run("--with", starter, "-n", "2", "--tag-output")
    result = run_ranks(WHO, 2, front, args=["-n", "7", "--help"])
    assert result.values("who") == [[2, 2.0, "1", ["-n", "7", "--help"]]] * 2
    for rank in (0, 1):
        assert re.search(rf"^\[(1,)?{rank}\]\S* ?rank {rank} speaks$", result.stdout, re.MULTILINE), result
    assert re.search(r"^ring run: \$ .*script\.py -n 7 --help$", result.stderr, re.MULTILINE), result


@pytest.mark.parametrize("starter", STARTERS)
def test_output_in_files(starter, tmp_path):
    script = "import os; print('here', os.environ.get('PMIX_RANK') or os.environ['LOCAL_RANK'])"
    result = run_ranks(script, 2, ring_run("--with", starter, "-n", "2", "--output-dir", str(tmp_path / "logs")))
    assert "here" not in result.output
    written = [file.read_text() for file in (tmp_path / "logs").rglob("*") if file.is_file()]
    assert sorted(filter(None, written)) == ["here 0\n", "here 1\n"]


@pytest.mark.mpi
def test_the_documented_commands(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(WHO))
    for command in commands("docs/launching/one_machine.md", "tests/launcher/test_run.py"):
        result = run_ranks("", 2, ["sh", "-c", f"cd {tmp_path} && PATH={Path(RING).parent}:$PATH && {command}"])
        options = ["--epochs", "5"] if "--epochs" in command else []
        assert result.values("who") == [[2, 2.0, "1", options]] * 2


def test_a_command_behind_a_shell_and_a_rank_that_never_comes(tmp_path):
    script = """
        import os, sys
        import ring_plugins as ring
        if os.environ["LOCAL_RANK"] == "1" and sys.argv[1:]:
            sys.exit(0)
        ring.init()
        print(f"size {ring.size()}\\n", end="")
    """
    front = [RING, "run", "--with", "python", "-n", "2", "sh", "-c", f'{sys.executable} "$@"; exit $?', "sh"]
    assert run_ranks(script, 2, front).stdout.count("size 2") == 2
    result = run_ranks(script, 2, front, args=["leave"], check=False)
    assert result.returncode != 0
    assert "rank 1 ended (exit status 0) before it reached ring_plugins.init()" in result.stderr


@pytest.mark.parametrize("on_failure", ["continue", pytest.param("end", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_in_init_ends_the_job_at_once_under_its_name(on_failure):
    script = """
        import os, signal
        import ring_plugins as ring
        from ring_plugins.core.control.liveness import LocalPeers
        if os.environ["LOCAL_RANK"] == "1":
            LocalPeers.map = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        ring.init()
        print("joined")
    """
    options = ["-n", "2", "--with", "python", "--on-failure", on_failure]
    result = run_ranks(script, 2, ring_run(*options), check=False, timeout=30)  # before RING_START_TIMEOUT
    assert result.returncode and "joined" not in result.output, result
    assert "rank 1 was killed by SIGKILL" in result.stderr
    assert "before it completed ring_plugins.init(), where the others wait for it." in result.stderr


@pytest.mark.parametrize(
    "on_failure", ["continue", *(pytest.param(how, marks=pytest.mark.slow) for how in ("replace", "on a host"))]
)
def test_a_rank_that_ends_its_process_with_status_0_before_the_others_is_lost(on_failure):
    """They go on without it, so it has not ended normally. With "replace", another process takes its place."""
    script = """
        import os, time
        import ring_plugins as ring
        from ring_plugins.core.rendezvous.spawn import slots
        ring.init()
        if ring.rank() == 1:  # also in a process that takes its place
            os._exit(0)
        ring.barrier()
        print(f"{ring.size()} left")
        while os.environ["RING_ON_FAILURE"] == "replace" and slots().is_lost(1):
            time.sleep(0.01)  # until `ring run` gives its place to another process
    """
    where = ["-H", "127.0.0.1:2", "--no-check"] if on_failure == "on a host" else []
    policy = "continue" if on_failure == "on a host" else on_failure
    result = run_ranks(script, 2, ring_run("-n", "2", *where, "--on-failure", policy), timeout=60)
    assert "1 left" in result.output
    is_replaced = "starting another process in the place of rank 1." in result.output
    assert is_replaced == (on_failure == "replace"), result
    how = "nobody had joined yet in the place of rank 1" if is_replaced else "rank 1 died"
    assert f"ring run: {how}, and the other 1 ended normally." in result.output, result


@pytest.mark.parametrize(
    ("end", "status", "last"),
    [
        ("os._exit(3)", 3, "rank 1 ended with exit status 3."),
        ("os._exit(1)", 1, "rank 1 ended with exit status 1."),
        ("os._exit(137)", 0, "rank 1 died, and the other 2 ended normally."),
        ("ctypes.CDLL(None)._exit(3)", 0, "rank 1 died, and the other 2 ended normally."),
    ],
)
def test_how_a_rank_ends_decides_once_whether_the_others_go_on(end, status, last):
    """With a failure's status they do not, and none says that it does; a library that ends the process is a crash."""
    script = f"""
        import ctypes, os, time
        import ring_plugins as ring
        ring.init()
        for step in range(100):
            if step == 5 and ring.rank() == 1 and ring.size() == 3:
                {end}
            ring.barrier()
            time.sleep(0.005)
    """
    command = ring_run("-n", "3", "--with", "python", "--on-failure", "continue")
    result = run_ranks(script, 3, command, check=False, timeout=60)
    assert result.returncode == status and result.output.splitlines()[-1] == f"ring run: {last}", result
    assert result.output.count("the job goes on with 2 of its 3 ranks") == (status == 0)


ENDLESS = """
    import os, subprocess, sys, time
    import ring_plugins as ring
    from tests.worker import report_pid
    ring.init()
    if sys.argv[1:]:
        subprocess.Popen(["sleep", "600"], start_new_session=True)  # outlives the rank
    report_pid()
    while True:
        ring.barrier()
        time.sleep(0.05)
"""


@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize(
    "ended", ["rank", "SIGKILL", *(pytest.param(how, marks=pytest.mark.slow) for how in ("interrupt", "SIGTERM"))]
)
def test_everything_ends(starter, ended):
    # After SIGKILL of `ring run` nothing is left that could find what its ranks leave behind.
    args = [] if ended == "SIGKILL" else ["leave something behind"]
    with start_ranks(ENDLESS, 2, ring_run("--with", starter, "-n", "2"), args) as job:
        job.pids()
        if ended == "rank":
            job.send_signal(1, signal.SIGKILL)
        elif ended == "interrupt":
            job.interrupt()
        else:
            job.signal_parent(signal.Signals[ended])
        result = job.wait(30)
    assert result.returncode == {"interrupt": 130, "SIGTERM": 143, "SIGKILL": -9, "rank": result.returncode}[ended]
    assert result.returncode != 0
    if ended == "rank":
        assert re.search(r"rank 1\b.*(SIGKILL|died|Killed)", result.output, re.DOTALL), result


@pytest.mark.slow
def test_sigterm_to_ring_run_reaches_ranks_that_go_on_after_losses_and_only_call_collectives():
    script = """
        import numpy as np
        import ring_plugins as ring
        from tests.worker import report, report_pid
        ring.init()
        rank = ring.rank()
        report_pid()
        try:
            while True:
                ring.all_reduce(np.ones(4))
        except SystemExit as error:
            report("status", error.code, rank)
            raise
    """
    with start_ranks(script, 3, ring_run("-n", "3", "--on-failure", "continue")) as job:
        job.pids()
        job.signal_parent(signal.SIGTERM)
        result = job.wait(30)
    assert result.returncode == 143
    assert result.values("status") == [143] * 3  # no rank was killed
    assert "goes on" not in result.output and "Traceback" not in result.output


def test_dry_run_prints_only():
    result = run_ranks("print('ran')", 2, ring_run("--dry-run", "-n", "2", "--with", "python", "-x", "A=b c"))
    assert re.fullmatch(r"env 'A=b c' \S*python\S* \S+script.py\n", result.stdout), result
    assert result.stderr == ""
