"""Jobs that go on without a killed rank under launchers which end all processes when one dies."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.rendezvous import launcher_shim, shim_setup, spawn
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
        return [str(mpich / "bin" / "mpiexec"), "-n", str(ranks), sys.executable]
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


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("victim", ["first", "other"])
def test_a_shim_that_is_killed_ends_the_job(launcher, victim):
    with start_ranks(RANK, 3, command(launcher, 3), env={"TEST_END": "never"}) as job:
        job.pids()
        shims = [process for process in job.processes() if launcher_shim.__file__ in process.cmdline()]
        assert len(shims) == 3 and all(process.memory_info().rss < 20e6 for process in shims)
        next(process for process in shims if victim in process.cmdline()).kill()
        assert job.wait(30).returncode


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "mpirun", "MPICH"])
def test_a_users_signal_reaches_the_ranks(launcher):
    """As `srun --signal=USR1` and `mpirun` send it; torchrun sends none."""
    with start_ranks(RANK, 2, command(launcher, 2), env={"TEST_END": "never"}) as job:
        job.pids()
        if launcher == "MPICH":  # its mpiexec would end: as a scheduler that reaches all processes
            for process in job.processes():
                if launcher_shim.__file__ in process.cmdline():
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
        shim_setup.become_launcher_shim(record, 1, on_failure, 0, "leave it out")


def test_what_cannot_work_is_rejected(monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("became a shim"))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    one_host = LaunchRecord("mpi", "mpirun (Open MPI)", 1, 4, 1, 4)
    several = LaunchRecord("mpi", "mpirun (Open MPI)", 1, 4, 1, 2)
    with monkeypatch.context() as without:
        without.setenv("RING_SHARED_MEMORY", "0")
        rejected(several, r"\"replace\" does not work under mpirun \(Open MPI\) if it does not start", "replace")
    with monkeypatch.context() as kept:
        kept.setenv("RING_STANDBYS", "1")
        rejected(
            several, r"RING_STANDBYS=1 does not work under mpirun \(Open MPI\) on several hosts.*unset it", "replace"
        )
    with monkeypatch.context() as strangers:
        strangers.setattr(shim_setup, "why_users_are_unknown", lambda: "all users show as this one")
        rejected(
            one_host, r"work under mpirun \(Open MPI\) here, since all users show as this one: a stranger could pose"
        )
    rejected(
        LaunchRecord("mpi", "MPI", 1), "work under MPI if it does not start all ranks on this host. It works on one"
    )
    rejected(LaunchRecord("rendezvous", "the variables RANK", 1, 4, 1, 4), "ranks on this host. .*; or leave it out")
    monkeypatch.setattr(shim_setup, "world_size_if_initialized", lambda: 4)
    rejected(one_host, "if the script initializes MPI itself")
    monkeypatch.setattr(shim_setup, "world_size_if_initialized", lambda: 0)
    monkeypatch.setattr(sys, "orig_argv", ["python"])
    rejected(one_host, "cannot start again: .* standard input")
    monkeypatch.setattr(spawn, "command", lambda: ["python", "train.py"])
    monkeypatch.setattr(shim_setup, "_launcher", lambda own: 0)
    rejected(one_host, "containers of their own")
    rejected(several, "containers of their own")
    rejected(several, "containers of their own", "replace")
    rejected(LaunchRecord("mpi", "mpirun (PMIx)", 1, 4, 1), "containers of their own", "replace")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    rejected(LaunchRecord("mpi", "mpirun (PMIx)", 1, 4, 1), "containers of their own")  # as far as any other here
    monkeypatch.setenv("RING_VIRTUAL_NODES", "2")
    rejected(one_host, "unset RING_VIRTUAL_NODES")


def test_processes_that_meet_on_several_hosts_learn_where_each_is(monkeypatch):
    """Ranks 0 and 2 on one host, 1 and 3 on another; all run the same."""
    record = LaunchRecord("mpi", "mpirun (Open MPI)", 3, 4, 1, 2)
    first = {"addresses": ["10.0.0.1"], "port": 7, "key": "hush"}

    def exchange(record, own):
        everyone = [{**own, "domain": name, "host": name, "work": "1"} for name in ("a", "b", "a", "b")]
        everyone[record.rank]["work"] = own["work"]
        return [everyone[0] | first, *everyone[1:]]

    monkeypatch.setattr(shim_setup.mpi, "exchange", exchange)
    monkeypatch.setattr(shim_setup, "shared_memory_domain", lambda: "b")
    job, hosts = shim_setup._meet_on_several_hosts(record, "1", ["python", "x.py"], {"RING_ON_FAILURE": "replace"})
    assert hosts == [("a", [0, 2]), ("b", [1, 3])]
    assert HostJob(**job).ranks == [1, 3] and job["index"] == 1 and job["addresses"] == ["10.0.0.1"]
    assert (job["port"], job["key"], job["size"], job["hosts"], job["replaces"]) == (7, "hush", 4, 2, True)
    policy = {"RING_ON_FAILURE": "continue"}
    assert not shim_setup._meet_on_several_hosts(record, "1", ["python"], policy).job["replaces"]
    with pytest.raises(ArgumentError, match="rank 3 has another command, directory or min_ranks than rank 0"):
        shim_setup._meet_on_several_hosts(record, "2", ["python"], policy)


def test_ranks_get_no_variable_that_tells_a_process_of_the_launcher_who_it_is():
    launchers = {
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "PMI_FD",
        "RANK",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
        "SLURM_PROCID",
    }
    kept = {"PATH", "SLURM_JOB_ID", "RING_TIMEOUT", "OMP_NUM_THREADS", "OMPI_ALLOW_RUN_AS_ROOT", "I_MPI"}
    found = shim_setup.environment_of_ranks(dict.fromkeys([*launchers, *kept, "RING_LAUNCHER", "SLURM_NTASKS"], "1"))
    assert set(found) == kept


class Shims:
    """Processes that hold the slots of a launcher, which is a process of the test."""

    def __init__(self, size, work="exit 7", timeout=20):
        self.name, self.size, self.work, self.timeout = f"test-{uuid.uuid4().hex}", size, work, timeout
        self.launcher = subprocess.Popen(["sleep", "60"])
        self.started = launcher_shim.start_time(self.launcher.pid)
        self.processes = [self.launcher]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def start(self, slot, digest="0" * 16):
        own = [("other" if slot else "first"), self.name, str(slot or self.size), digest]
        watched = [str(self.launcher.pid), self.started, str(self.timeout)]
        work = [] if slot else ["sh", "-c", self.work]
        return self.popen(sys.executable, "-I", "-S", launcher_shim.__file__, *own, *watched, *work)

    def stranger(self, what):
        script = f"import os, socket, sys; s = socket.socket(socket.AF_UNIX); name = chr(0) + sys.argv[1]; {what}"
        return self.popen(sys.executable, "-c", script.replace("setuid", "os.setuid(65534)"), self.name)

    def popen(self, *command):
        self.processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return self.processes[-1]


def ends(process):
    _, error = process.communicate(timeout=20)
    return process.returncode, error


def fails(process, text):
    status, error = ends(process)
    assert status == 1 and text in error


def test_shims_leave_with_the_first_ones_status_whoever_comes_first():
    with Shims(3) as shims:
        started = [shims.start(slot) for slot in (2, 0, 1)]
        assert [ends(process) for process in started] == [(7, "")] * 3


@pytest.mark.parametrize("victim", ["launcher", "first", "other", "asked"])
def test_nothing_outlives_any_of_them(victim, tmp_path):
    begun = tmp_path / "begun"
    with Shims(2, f"echo $$ > {begun}; exec sleep 60") as shims:
        first, other = shims.start(0), shims.start(1)
        while not (begun.exists() and begun.read_text().strip()):
            time.sleep(0.01)
        sleep = int(begun.read_text())
        {"launcher": shims.launcher, "first": first, "other": other, "asked": other}[victim].send_signal(
            signal.SIGTERM if victim == "asked" else signal.SIGKILL
        )
        codes = [ends(process)[0] for process in (first, other)]
        expected = {"launcher": [143, 143], "first": [-9, 1], "other": [143, -9], "asked": [143, 143]}
        assert codes == expected[victim]
        deadline = time.monotonic() + 10
        while launcher_shim.start_time(sleep):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_command_that_differs_and_a_rank_that_never_comes_are_errors():
    with Shims(2) as shims:
        first, other = shims.start(0), shims.start(1, "1" * 16)
        fails(first, "rank 1 has another command, directory or min_ranks than rank 0")
        assert ends(other)[0] == 1
    with Shims(3, timeout=0.3) as shims:
        first, other = shims.start(0), shims.start(1)
        fails(first, "rank 0 waited 0.3 s for rank 2 to reach init")
        assert ends(other)[0] == 1
    with Shims(2, timeout=0.3) as shims:
        fails(shims.start(1), "rank 1 waited 0.3 s for rank 0 to reach init")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_processes_of_another_user_are_not_believed():
    with Shims(2) as shims:
        first = shims.start(0)
        deadline = time.monotonic() + 10
        find = "import re; name = re.findall(f'@({name[1:]}/.*)', open('/proc/net/unix').read())[0]"
        what = f"{find}; setuid; s.connect(chr(0) + name); sys.exit(len(s.recv(1)))"
        while ends(stranger := shims.stranger(what))[0]:
            assert time.monotonic() < deadline, "the first does not listen"
        assert stranger.returncode == 0 and first.poll() is None
        assert ends(shims.start(1)) == (7, "") and ends(first) == (7, "")
    with Shims(2) as shims:
        more = "t = socket.socket(socket.AF_UNIX); t.bind(name + '/0123456789abcdef'); t.listen()"
        shims.stranger(f"import time; setuid; s.bind(name); s.listen(); {more}; time.sleep(60)")
        time.sleep(0.3)
        shims.timeout = 0.3
        fails(shims.start(1), "rank 1 waited 0.3 s for rank 0")
        shims.timeout = 20
        started = [shims.start(1), shims.start(0)]
        assert [ends(process) for process in started] == [(7, "")] * 2
