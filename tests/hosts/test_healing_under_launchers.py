"""mpirun, torchrun and srun over several hosts: ranks, and all ranks of a host, are killed, and the others go on."""

import json
import signal

import pytest

from ring_plugins.core.rendezvous import launcher_shim
from tests.hosts import find_mpich, hosts
from tests.keras import test_recovery as of_keras
from tests.launchers import find_mpirun
from tests.lightning import test_recovery as of_lightning
from tests.torch.test_recovery import CHECKS, check_survivors

pytestmark = [pytest.mark.slow, pytest.mark.mpi]
LAUNCHERS = ["srun", "mpirun", "MPICH", "torchrun"]


@pytest.fixture(scope="module")
def cluster():
    with hosts(2) as cluster:
        yield cluster


def start(cluster, launcher, script, env):
    """A script on two ranks of each host."""
    if launcher == "mpirun":
        if find_mpirun() is None:
            pytest.skip("there is no mpirun")
        return cluster.mpirun(script, env=env)
    if launcher == "MPICH":
        if find_mpich() is None:
            pytest.skip("MPICH's wheel is not installed")
        return cluster.mpich(script, env=env)
    return (cluster.torchrun if launcher == "torchrun" else cluster.srun)(script, env=env)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "deaths",
    [
        {1: [3, "in step"]},
        {0: [2, "barrier 3 in"], 1: [2, "barrier 3 in"]},
        {2: [1, "in forward"], 3: [1, "in forward"]},
    ],
    ids=str,
)
def test_ranks_and_all_of_a_host_may_be_killed(cluster, launcher, deaths):
    env = {"TEST_DEATHS": json.dumps(deaths), "TEST_MIN": "1", "TEST_RANKS": "4"}
    result = start(cluster, launcher, CHECKS, env).run(90)
    check_survivors(result, deaths, 4)
    died = f"ranks {', '.join(map(str, deaths))} died" if len(deaths) == 2 else "rank 1 died"
    assert f"ring run: {died}, and the other {4 - len(deaths)} ended normally." in result.output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_leaves_after_the_step_in_which_it_gets_sigterm(cluster, launcher):
    deaths = {0: [2, "SIGTERM"], 3: [4, "SIGTERM"]}
    env = {"TEST_DEATHS": json.dumps(deaths), "TEST_MIN": "1", "TEST_RANKS": "4"}
    result = start(cluster, launcher, CHECKS, env).run(90)
    check_survivors(result, deaths, 4)
    assert result.output.count("left on SIGTERM") == 2 and "Traceback" not in result.output
    assert "ring run: ranks 0, 3 left, and the other 2 ended normally." in result.output


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("plugin", ["lightning", *of_keras.BACKENDS])
@pytest.mark.parametrize("deaths", [{0: [2, "barrier 3 in"]}, {1: [2, "SIGTERM"]}], ids=str)
def test_a_fit_goes_on_without_a_rank(cluster, launcher, plugin, deaths, tmp_path):
    plugins = of_lightning if plugin == "lightning" else of_keras
    own = {"TEST_ROOT": str(tmp_path)} if plugin == "lightning" else {"KERAS_BACKEND": plugin}
    env = {"TEST_DEATHS": json.dumps(deaths), "TEST_MIN": "1", "TEST_RANKS": "4", **own}
    result = start(cluster, launcher, plugins.CHECKS, env).run(120)
    plugins.check_survivors(result, deaths, 4)


RANK = """
import os, signal, sys, time
import numpy as np, ring_plugins as ring
from tests.worker import report
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
ring.init(on_failure="continue", min_ranks=2)
me, end = ring.rank(), os.environ["TEST_END"]
names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID")
report("who", [me, ring.size(), os.uname().nodename, [name for name in names if name in os.environ]], me)
report("pid", os.getpid(), me)
for step in range(10 ** 9):
    ring.all_reduce(np.ones(4))
    if step == 5 and me == 3 and end == "exception":
        raise ValueError("a bad sample")
    if step == 5 and me == 2 and end == "status":
        sys.exit(3)
    if step == 5 and me and end == "too few":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("end", ["exception", "status", "too few"])
def test_a_job_that_fails_has_a_status_everywhere(cluster, launcher, end):
    result = start(cluster, launcher, RANK, {"TEST_END": end}).run(90, check=False)
    assert result.returncode == (3 if end == "status" and launcher != "torchrun" else 1), result
    assert result.values("who") == [[rank, 4, f"host{1 + rank // 2}", []] for rank in range(4)]
    assert "a bad sample" in result.output or end != "exception"


def launchers_of_each_host(job):
    """torchrun's agents, or the stand-ins for SLURM's daemons."""
    return {process.parent() for process in job.processes() if launcher_shim._SHIM in process.cmdline()}


def stop_launcher(job, launcher, stop):
    """Press Ctrl-C, or send a signal to what the user has started, or SLURM's daemons."""
    if stop == "Ctrl-C":
        job.interrupt()
    elif launcher in ("mpirun", "MPICH"):
        job.signal_parent(stop)
    else:
        for process in launchers_of_each_host(job):
            process.send_signal(stop)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM, "Ctrl-C"])
def test_a_launcher_that_is_killed_or_interrupted_leaves_nothing(cluster, launcher, stop):
    with start(cluster, launcher, RANK, {"TEST_END": "never"}) as job:
        job.pids()
        stop_launcher(job, launcher, stop)
        result = job.wait(40, ignore_files=["sm_segment.*"], grace=15)
    assert result.returncode, result
