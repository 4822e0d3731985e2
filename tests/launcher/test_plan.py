"""What `ring run` makes of its options; only `mpirun --version` is run here, and a stand-in for it."""

import sys

import pytest

from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.launcher import mpirun, plan
from ring_plugins.launcher.hosts import Share
from ring_plugins.launcher.mpirun import Mpirun
from ring_plugins.launcher.plan import Options

COMMAND = (sys.executable, "train.py")


@pytest.fixture(autouse=True)
def _on_four_cores_with_mpi(monkeypatch):
    monkeypatch.setattr(plan, "cores", lambda: 4)
    monkeypatch.setattr(mpirun, "find", lambda _: Mpirun("/opt/mpirun", "Open MPI 5", "5.0.11"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    for name in ("SLURM_JOB_NODELIST", "PBS_NODEFILE", "RING_INTERFACE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_alone_it_takes_every_core_and_shares_threads():
    planned = plan.plan(Options(COMMAND))
    assert (planned.request.ranks, planned.request.shares, planned.hosts) == (4, (), ())
    assert planned.request.exports == {"OMP_NUM_THREADS": "1"}
    assert plan.plan(Options(COMMAND, ranks=2)).request.exports == {"OMP_NUM_THREADS": "2"}


def test_one_rank_a_gpu_where_there_are_any(monkeypatch):
    monkeypatch.setattr(plan, "accelerators", lambda: 2)
    assert plan.plan(Options(COMMAND)).request.ranks == 2


def test_hosts_decide_how_many():
    planned = plan.plan(Options(COMMAND, hosts="far1:2,far2:3"))
    assert (planned.request.ranks, planned.request.shares) == (5, (Share("far1", 2), Share("far2", 3)))
    assert planned.hosts == ("far1", "far2")
    assert "PATH" in planned.request.exports  # another host knows nothing of ours
    assert plan.plan(Options(COMMAND, ranks=2, hosts="far1:2,far2:3")).hosts == ("far1",)


def test_what_is_too_much_is_said():
    planned = plan.plan(Options(COMMAND, ranks=9))
    assert planned.request.crowded
    assert "9 ranks share 4 cores" in planned.notices[0]
    assert "9 ranks are more than the 4 slots" in plan.plan(Options(COMMAND, ranks=9, hosts="far:4")).notices[0]
    assert plan.plan(Options(COMMAND, ranks=2, hosts="far1,far2")).notices == ()


def test_inside_an_allocation_mpirun_knows_the_hosts(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    planned = plan.plan(Options(COMMAND))
    assert (planned.request.ranks, planned.request.shares, planned.hosts) == (8, (), ())


@pytest.mark.parametrize(("found", "said"), [(None, "no mpirun"), ("there", "mpi4py is not installed")])
def test_without_mpi_one_host_needs_none(found, said, monkeypatch):
    monkeypatch.setattr(mpirun, "find", lambda _: found)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    planned = plan.plan(Options(COMMAND, ranks=2, hosts="localhost:2"))
    assert planned.by is None
    assert said in planned.notices[0]
    with pytest.raises(LaunchError, match=f'{said}.*pip install "ring_plugins\\[mpi\\]"'):
        plan.plan(Options(COMMAND, ranks=2, hosts="far:2"))
    with pytest.raises(LaunchError, match=said):
        plan.plan(Options(COMMAND, ranks=2, by="mpirun"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(()), "nothing to run"),
        (Options(COMMAND, ranks=0), "-n 0"),
        (Options(COMMAND, hosts="a", hostfile="b"), "-H and --hostfile"),
        (Options(COMMAND, hosts="far:2", by="python"), "on this host only"),
        (Options(COMMAND, ranks=5, bind="core"), "--bind core: 5 ranks on 4 cores"),
        (Options(("no-such-program",)), "no program 'no-such-program'"),
    ],
)
def test_what_cannot_be_done_is_named(options, said):
    with pytest.raises((ArgumentError, LaunchError), match=said):
        plan.plan(options)


def test_a_script_alone_is_run_by_this_python(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    assert mpirun.program_and_arguments([str(script), "-v"]) == (sys.executable, str(script), "-v")
    assert mpirun.program_and_arguments(["sh", "-c", "x"])[0].endswith("/sh")
