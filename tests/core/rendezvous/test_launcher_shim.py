"""Jobs that go on without a killed rank under launchers which end all processes when one dies."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.rendezvous import launcher_shim, launchers, spawn
from ring_plugins.core.rendezvous.record import LaunchRecord
from ring_plugins.launcher.coordinator_link import HostJob
from tests.hosts.cluster import find_mpich
from tests.launch import run_ranks, start_ranks
from tests.launchers import find_mpirun, launcher_command
from tests.torch.test_recovery import check_survivors, train

FAKE_SRUN = str(Path(__file__).with_name("fake_srun.py"))
LAUNCHERS = ["srun", "mpirun", "MPICH", "torchrun"]
#: The default suite runs the others' tests under this one, which needs nothing and starts at once.
FIRST, *OTHERS = LAUNCHERS
EVERYWHERE = [FIRST, *(pytest.param(launcher, marks=pytest.mark.slow) for launcher in OTHERS)]


def command(launcher, ranks):
    """The words before the script's name."""
    if launcher == "srun":
        return [sys.executable, FAKE_SRUN, str(ranks), sys.executable]
    if launcher == "MPICH":
        if (mpich := find_mpich()) is None:
            pytest.skip("MPICH's wheel is not installed")
        library = f"MPI4PY_LIBMPI={mpich / 'lib' / 'libmpi.so.12'}"
        return ["env", library, str(mpich / "bin" / "mpiexec"), "-n", str(ranks), sys.executable]
    if launcher == "mpirun" and find_mpirun() is None:
        pytest.skip("there is no mpirun")
    return launcher_command(launcher, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "deaths",
    [
        {0: [2, "in backward"]},
        {1: [3, "in step"]},
        {3: [0, "in forward"]},
        {0: [2, "barrier 2 in"], 2: [2, "barrier 2 in"]},
    ],
)
def test_any_rank_may_be_killed_and_two_at_once(launcher, deaths):
    check_survivors(train(deaths, launcher=command(launcher, 4)), deaths)


RANK = """
    import os, signal, sys, time
    import numpy as np, ring_plugins as ring
    from tests.worker import report
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    world = ring.init(on_failure="continue", min_ranks=int(os.environ.get("TEST_MIN", "1")))
    assert ring.init() is world
    me, end = ring.rank(), os.environ["TEST_END"]
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID")
    cores = len(os.sched_getaffinity(0))
    report("who", [me, ring.size(), cores, sys.argv[1:], [name for name in names if name in os.environ]], me)
    ring.all_reduce(np.ones(4))
    report("pid", os.getpid(), me)
    if me == 1 and end == "exception":
        raise ValueError("a bad sample")
    if me == 0 and end == "status":
        sys.exit(3)
    if me == 0 and end == "loss":
        os.kill(os.getpid(), signal.SIGKILL)
    report("left", int(ring.all_reduce(np.ones(1), ring.SUM)[0]), me)
    while end == "never" and not ring.all_reduce(np.array([1.0 * len(heard)]), ring.MAX)[0]:
        time.sleep(0.01)
    time.sleep(0.1)
    report("heard", len(heard), me)
"""


@pytest.mark.mpi
def test_under_mpirun_a_killed_rank_0_does_not_end_the_others():
    result = run_ranks(RANK, 3, command("mpirun", 3), env={"TEST_END": "loss"})
    assert [who[:2] for who in result.values("who")] == [[0, 3], [1, 3], [2, 3]] and result.values("left") == [2, 2]
    assert "the job goes on with 2 of its 3 ranks" in result.output


def run(launcher, end, ranks=2, **options):
    return run_ranks(RANK, ranks, command(launcher, ranks), env={"TEST_END": end}, check=False, **options)


@pytest.mark.parametrize("launcher", EVERYWHERE)
def test_an_exception_ends_the_job_with_its_traceback(launcher):
    result = run(launcher, "exception", args=["--lr", "3"])
    assert result.returncode == 1, result
    tracebacks = 2 if launcher == "torchrun" else 1  # torchrun adds its own
    assert "ValueError: a bad sample" in result.output and result.output.count("Traceback") == tracebacks
    assert [who[:2] + who[3:] for who in result.values("who")] == [[rank, 2, ["--lr", "3"], []] for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_job_has_the_exit_status_of_a_failed_rank_or_of_too_few(launcher):
    assert run(launcher, "none").returncode == 0
    assert run(launcher, "status").returncode == (1 if launcher == "torchrun" else 3)
    result = run_ranks(RANK, 2, command(launcher, 2), env={"TEST_END": "loss", "TEST_MIN": "2"}, check=False)
    assert result.returncode and "Training cannot go on with 1 rank: min_ranks=2." in result.output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM, "Ctrl-C"])
def test_a_launcher_that_is_killed_or_interrupted_leaves_nothing(launcher, stop):
    with start_ranks(RANK, 2, command(launcher, 2), env={"TEST_END": "never"}) as job:
        job.pids()
        job.interrupt() if stop == "Ctrl-C" else job.signal_parent(stop)
        result = job.wait(30)
        assert result.returncode and not any("heard" in report for report in result.reports.values()), result


def shims(job):
    return [process for process in job.processes() if launcher_shim._SHIM in process.cmdline()]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("victim", ["ring run", "shim"])
def test_a_process_of_the_launcher_that_is_killed_ends_the_job(launcher, victim):
    with start_ranks(RANK, 3, command(launcher, 3), env={"TEST_END": "never"}) as job:
        job.pids()
        others = shims(job)
        assert len(others) == 2 and all(process.memory_info().rss < 20e6 for process in others)
        supervisor = next(process for process in job.processes() if process.pid == int(others[0].cmdline()[-1]))
        (supervisor if victim == "ring run" else others[0]).kill()
        assert job.wait(30).returncode


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "mpirun", "MPICH"])
def test_a_users_signal_reaches_the_ranks(launcher):
    """As `srun --signal=USR1` and `mpirun` send it; torchrun sends none."""
    with start_ranks(RANK, 2, command(launcher, 2), env={"TEST_END": "never"}) as job:
        job.pids()
        if launcher == "MPICH":  # its mpiexec would end: as a scheduler that reaches all processes
            for process in job.processes():
                if process in shims(job) or "ring_plugins.__main__" in " ".join(process.cmdline()):
                    process.send_signal(signal.SIGUSR1)
        else:
            job.signal_parent(signal.SIGUSR1)
        result = job.wait(30)
        assert result.returncode == 0 and all(result.values("heard")), result


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_use_all_cores_to_which_the_launcher_has_bound_any_of_them():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core")
    result = run_ranks(
        RANK, 2, [find_mpirun(), "--bind-to", "core", "-n", "2", sys.executable], env={"TEST_END": "none"}
    )
    assert [who[2] for who in result.values("who")] == [2, 2]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("wrapper", [["sh", "-c", '"$0" "$@"; exit $?'], ["sh", "-c", 'exec "$0" "$@"']])
def test_a_shell_may_be_between_the_launcher_and_the_script(wrapper):
    front = command("mpirun", 2)
    result = run_ranks(RANK, 2, [*front[:-1], *wrapper, front[-1]], env={"TEST_END": "none"})
    assert [who[:2] for who in result.values("who")] == [[0, 2], [1, 2]]


@pytest.mark.slow
@pytest.mark.mpi
def test_a_job_of_one_rank_and_a_script_that_has_initialized_mpi():
    none = {"TEST_END": "none"}
    run_ranks(RANK, 1, command("mpirun", 1), env=none)
    result = run_ranks("\n    from mpi4py import MPI" + RANK, 2, command("mpirun", 2), env=none, check=False)
    assert result.returncode and "the script initializes MPI itself" in result.output


def rejected(record, match, on_failure="continue"):
    with pytest.raises(ArgumentError, match=match):
        launcher_shim.restart_under_supervisors(record, 1, on_failure, 0, "leave it out")


OPEN_MPI = next(one for one in launchers.LAUNCHERS if "Open MPI" in one.name)
MPIRUN = LaunchRecord(OPEN_MPI, 1, 4, 1, 4)


def test_what_cannot_work_is_rejected(monkeypatch):
    monkeypatch.setattr(launcher_shim, "_meet", lambda *_: pytest.fail("met the others"))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with monkeypatch.context() as initialized:
        initialized.setattr(launcher_shim, "world_size_if_initialized", lambda: 4)
        rejected(MPIRUN, "if the script initializes MPI itself")
    with monkeypatch.context() as typed:
        typed.setattr(sys, "orig_argv", ["python"])
        rejected(MPIRUN, "cannot start again: .* standard input")
    monkeypatch.setenv("RING_VIRTUAL_NODES", "2")
    rejected(MPIRUN, "unset RING_VIRTUAL_NODES")


def everyone(domains, work="1"):
    """What the ranks tell: of rank 0, also where the supervisors meet."""
    told = [{"domain": name, "host": name, "work": work, "pid": 1, "cores": [0]} for name in domains]
    told[0] |= {"addresses": ["10.0.0.1"], "port": 7, "key": "hush"}
    return told


@pytest.mark.parametrize(("option", "remedy"), [("RING_STANDBYS", "unset it"), ("max_ranks", "leave it out")])
def test_what_works_on_one_host_only_is_rejected_on_several(monkeypatch, option, remedy):
    match = rf"{option}=1 does not work under mpirun \(Open MPI\) on several hosts, only on one: {remedy}"
    monkeypatch.setattr(spawn, "command", lambda: ["python", "x.py"])
    monkeypatch.setattr(launcher_shim, "_meet", lambda *_: everyone("aabb"))
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("became a supervisor"))
    if option == "RING_STANDBYS":
        monkeypatch.setenv(option, "1")
    with pytest.raises(ArgumentError, match=match):
        launcher_shim.restart_under_supervisors(MPIRUN, 1, "replace", int(option == "max_ranks"), "leave it out")


def test_processes_that_meet_on_several_hosts_learn_where_each_is():
    """Ranks 0 and 2 on one host, 1 and 3 on another; all run the same."""
    told = everyone("abab")
    hosts = launcher_shim.ranks_of_hosts(told)
    assert hosts == [[0, 2], [1, 3]]
    policy = {"RING_ON_FAILURE": "replace"}
    place = launcher_shim._place(told, hosts, [1, 3], ["python", "x.py"], policy)
    job = HostJob(**place["job"])
    assert place["hosts"] == [("a", [0, 2]), ("b", [1, 3])]
    assert job.ranks == [1, 3] and job.index == 1 and job.addresses == ["10.0.0.1"]
    assert (job.port, job.key, job.size, job.hosts, job.replaces) == (7, "hush", 4, 2, True)
    place = launcher_shim._place(told, hosts, [0, 2], ["python"], {"RING_ON_FAILURE": "continue"})
    assert not place["job"]["replaces"] and place["job"]["addresses"] == ["127.0.0.1"]


def test_a_rank_with_another_command_is_an_error_on_all(monkeypatch):
    different = [*everyone("aaa"), *everyone("a", work="2")]
    by = replace(OPEN_MPI, exchange=lambda record, own: different)
    with pytest.raises(ArgumentError, match="rank 3 has another command, directory or min_ranks than rank 0"):
        launcher_shim._meet(replace(MPIRUN, launcher=by), ["python"], None)


def test_a_shim_waits_for_the_end_of_a_process_whose_parent_has_not_asked_how_it_ended():
    supervisor = subprocess.Popen(["sleep", "60"])
    shim = subprocess.Popen([sys.executable, "-I", "-S", "-c", launcher_shim._SHIM, str(supervisor.pid)])
    with pytest.raises(subprocess.TimeoutExpired):
        shim.wait(1)
    supervisor.kill()
    assert shim.wait(20) == 0
    supervisor.wait()
    subprocess.run([sys.executable, "-I", "-S", "-c", launcher_shim._SHIM, str(supervisor.pid)], timeout=20, check=True)
