"""Jobs started by mpirun."""

import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from ring_plugins.core.net.sockets import connect_below
from ring_plugins.core.rendezvous import mpi
from ring_plugins.core.rendezvous.launchers import NONE
from ring_plugins.core.rendezvous.record import LaunchRecord
from tests.launch import run_ranks, start_ranks


@pytest.mark.mpi
def test_a_script_that_has_initialized_mpi_itself_and_goes_on_using_it():
    script = """
        from mpi4py import MPI
        import numpy as np, ring_plugins as ring
        from tests.worker import report
        before = MPI.COMM_WORLD.allreduce(1)
        ring.init()
        report("sum", float(ring.all_reduce(1.0, ring.SUM)) + before + MPI.COMM_WORLD.allreduce(1))
        ring.shutdown()
        ring.init()
        report("again", float(ring.all_reduce(1.0, ring.SUM)) + MPI.COMM_WORLD.allreduce(1))
    """
    result = run_ranks(script, 2, "mpirun")
    assert result.values("sum") == [6, 6]
    assert result.values("again") == [4, 4]


@pytest.mark.mpi
def test_mpi_without_thread_support_is_served_one_call_at_a_time():
    script = """
        import mpi4py
        mpi4py.rc.thread_level = "single"
        from mpi4py import MPI
        import numpy as np, ring_plugins as ring
        from tests.worker import report
        ring.init()
        works = [ring.all_reduce(np.full(200_000, i, np.float32), ring.SUM, wait=False) for i in range(4)]
        report("sums", [float(work.wait()[-1]) for work in works])
    """
    result = run_ranks(script, 2, "mpirun", env={"RING_VIRTUAL_NODES": "2"})
    assert result.values("sums") == [[0, 2, 4, 6]] * 2


@pytest.mark.mpi
def test_more_ranks_asked_for_than_started_follows_the_launcher_and_says_so():
    script = """
        import ring_plugins as ring
        from tests.worker import report
        ring.init(ranks=3)
        report("size", ring.size())
    """
    result = run_ranks(script, 2, "mpirun")
    assert result.values("size") == [2, 2]
    assert result.output.count("init(ranks=3) was requested, but mpirun (Open MPI) started 2") == 1


@pytest.mark.slow
@pytest.mark.mpi
def test_a_rank_that_gave_up_to_join_and_goes_on_with_its_script_does_not_hold_up_the_others_for_ever():
    script = """
        import os, time
        import ring_plugins as ring
        from ring_plugins.core.control.liveness import LocalPeers

        def interrupted(*args):
            raise KeyboardInterrupt

        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            LocalPeers.map = interrupted
        try:
            ring.init()
        except KeyboardInterrupt:
            time.sleep(600)
    """
    result = run_ranks(script, 2, "mpirun", env={"RING_START_TIMEOUT": "15"}, timeout=120, check=False)
    assert result.returncode != 0
    assert "Timeout (0:00:15)!" in result.output, result


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        ("sys.modules['mpi4py'] = None", "mpi4py is not installed"),
        ("import mpi4py, os; os.environ['MPI4PY_LIBMPI'] = '/nowhere/libmpi.so'", "finds no MPI library"),
    ],
)
def test_missing_mpi_is_named_with_the_pip_command_that_adds_it(hidden, said):
    pytest.importorskip("mpi4py")
    script = f"""
        import os, sys
        {hidden}
        import ring_plugins as ring
        ring.init()
    """
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    result = run_ranks(script, 1, "spawned", env=env, check=False)
    assert result.returncode != 0
    assert said in result.output
    assert 'pip install "ring_plugins[mpi]"' in result.output


@pytest.mark.mpi
def test_a_rank_that_never_calls_init_is_waited_for_no_longer_than_the_start_timeout():
    """MPI_Init itself waits for ever, and mpi4py holds the interpreter's lock meanwhile."""
    script = """
        import os, time
        import ring_plugins as ring
        if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
            time.sleep(100)
        ring.init()
    """
    result = run_ranks(script, 2, "mpirun", env={"RING_START_TIMEOUT": "2"}, timeout=20, check=False)
    assert result.returncode != 0
    assert "in mpi_init_waits_for_every_rank" in result.stderr


@pytest.mark.mpi
def test_a_rank_that_is_late_is_named_while_mpi_waits_for_it(tmp_path):
    script = f"""
        import os, pathlib, time
        import ring_plugins as ring
        from ring_plugins.core.base import progress_line
        progress_line.FIRST_SECONDS = 0.5
        if os.environ.get("OMPI_COMM_WORLD_RANK", "1") == "1":
            while not pathlib.Path({str(tmp_path / "said")!r}).exists():
                time.sleep(0.01)
        ring.init()
        ring.barrier()
    """
    with start_ranks(script, 2, "mpirun") as job:
        deadline = time.monotonic() + 60
        while "have come" not in (job.directory / "stderr").read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        (tmp_path / "said").touch()
        result = job.wait(60)
    assert result.returncode == 0
    assert "ring_plugins: 1 of 2 ranks have come, waiting for rank 1 to reach init(), after" in result.stderr


def test_ranks_that_hydra_has_started_find_their_job_by_its_proxy(tmp_path, monkeypatch):
    """Also a rank that is started through a shell. MPICH exports nothing that names a job."""
    monkeypatch.delenv("PMIX_NAMESPACE", raising=False)
    assert mpi._job() == ""
    proxy = tmp_path / "hydra_pmi_proxy"
    proxy.symlink_to(shutil.which("sh"))
    script = "from ring_plugins.core.rendezvous import mpi; print(mpi._job())"
    ranks = '"$0" -c "$1"; sh -c \'"$0" -c "$1"; true\' "$0" "$1"; true'
    command = [str(proxy), "-c", ranks, sys.executable, script]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    assert len(found) == 2 and found[0] == found[1] and found[0].startswith("hydra_pmi_proxy "), found


def test_nobody_can_take_the_place_of_a_ranks_mark_first(monkeypatch):
    monkeypatch.setenv("PMIX_NAMESPACE", f"job {os.urandom(8).hex()}")
    name = mpi._name(mpi._job(), 1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"\0{name}")
        stranger.listen()
        assert connect_below(name) is None
        with mpi.ShownArrivals(LaunchRecord(NONE, 1, 2, 1, 2)):
            with connect_below(name):
                pass
            user = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)
            assert connect_below(name) is None


def test_the_text_about_ranks_on_several_hosts(monkeypatch):
    monkeypatch.setattr(mpi.socket, "gethostname", lambda: "node2")
    assert (
        mpi._text([0, 2], 8, 4)
        == "2 of the 4 ranks on node2 have come, waiting for local ranks 1, 3 and for other hosts to reach init()"
    )
    assert (
        mpi._text([0, 1], 4, 2)
        == "2 of the 2 ranks on node2 have come, waiting for the ranks of other hosts to reach init()"
    )


@pytest.mark.mpi
def test_a_forked_child_that_calls_exit_ends():
    script = """
        import os, sys, time
        import ring_plugins as ring
        from tests.worker import report
        ring.init()
        child = os.fork()
        if child == 0:
            sys.exit(3)
        end, ended = time.monotonic() + 30, 0
        while not ended and time.monotonic() < end:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if not ended:
            os.kill(child, 9)
        report("status", os.waitstatus_to_exitcode(status) if ended else "still runs")
        ring.barrier()
    """
    assert run_ranks(script, 2, "mpirun", timeout=90).values("status") == [3, 3]


def test_a_process_that_leaves_mpi_says_so_to_mpichs_process_manager(monkeypatch):
    """MPICH itself says it at exit, which a process that becomes another program never reaches."""
    ours, managers = socket.socketpair()
    with ours, managers:
        monkeypatch.setenv("PMI_FD", str(ours.fileno()))
        managers.sendall(b"cmd=finalize_ack rc=0\n")
        mpi._leave_process_manager()
        assert managers.recv(64) == b"cmd=finalize\n"
    mpi._leave_process_manager()  # another MPI has closed it
    with open("/dev/null", "rb") as other:  # and something else has its number
        monkeypatch.setenv("PMI_FD", str(other.fileno()))
        mpi._leave_process_manager()
