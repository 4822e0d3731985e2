"""The plan that `ring run` makes from its options; nothing is started here."""

import sys
from dataclasses import replace

import pytest

from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.launcher import launch_plan, mpirun
from ring_plugins.launcher.hosts import Share
from ring_plugins.launcher.launch_plan import LaunchPlan, Options, adapt, exported_variables, make_plan
from ring_plugins.launcher.mpirun import JobSpec, Mpirun

COMMAND = (sys.executable, "train.py")


@pytest.fixture(autouse=True)
def _on_four_cores_with_mpi(monkeypatch):
    monkeypatch.setattr(launch_plan, "cores", lambda: 4)
    monkeypatch.setattr(mpirun, "find", lambda _: Mpirun("/opt/mpirun", "Open MPI 5", "5.0.11"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    for name in ("SLURM_JOB_NODELIST", "PBS_NODEFILE", "RING_INTERFACE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_one_host_gets_a_rank_for_every_core_and_shares_threads():
    planned = make_plan(Options(COMMAND))
    assert (planned.job.ranks, planned.job.shares, planned.hosts) == (4, (), ())
    assert planned.job.environment == {"OMP_NUM_THREADS": "1"}
    assert make_plan(Options(COMMAND, ranks=2)).job.environment == {"OMP_NUM_THREADS": "2"}


def test_a_host_with_gpus_gets_a_rank_for_each(monkeypatch):
    monkeypatch.setattr(launch_plan, "gpus", lambda: 2)
    assert make_plan(Options(COMMAND)).job.ranks == 2


@pytest.mark.parametrize(
    ("visible", "number"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("3, 1", 2),
        ("0,-1,1", 1),
        ("0,4,1", 1),
        ("zero,1", 0),
        ("GPU-01,GPU-02", 2),
        ("MIG-01,MIG-02", 1),
    ],
)
def test_gpus_are_counted_as_cuda_sees_them(monkeypatch, tmp_path, visible, number):
    for bus in range(4):
        (tmp_path / f"0000:0{bus}:00.0").mkdir()
    monkeypatch.setattr(launch_plan, "Path", lambda name: {"/proc/driver/nvidia/gpus": tmp_path}[name])
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launch_plan.gpus() == number


def test_the_slots_of_the_hosts_decide_the_number_of_ranks():
    planned = make_plan(Options(COMMAND, hosts="far1:2,far2:3"))
    assert (planned.job.ranks, planned.job.shares) == (5, (Share("far1", 2), Share("far2", 3)))
    assert planned.hosts == ("far1", "far2")
    assert "PATH" in planned.job.environment  # another host knows nothing of ours
    assert make_plan(Options(COMMAND, ranks=2, hosts="far1:2,far2:3")).hosts == ("far1",)


def test_more_ranks_than_cores_or_slots_are_noticed():
    planned = make_plan(Options(COMMAND, ranks=9))
    assert planned.job.oversubscribed
    assert "9 ranks share 4 cores" in planned.notices[0]
    assert "9 ranks are more than the 4 slots" in make_plan(Options(COMMAND, ranks=9, hosts="far:4")).notices[0]
    assert make_plan(Options(COMMAND, ranks=2, hosts="far1,far2")).notices == ()


def test_inside_an_allocation_mpirun_finds_the_hosts_itself(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    planned = make_plan(Options(COMMAND))
    assert (planned.job.ranks, planned.job.shares, planned.hosts) == (8, (), ())


@pytest.mark.parametrize(("found", "message"), [(None, "no mpirun"), ("there", "mpi4py is not installed")])
def test_one_host_needs_no_mpi_and_several_name_what_is_missing(found, message, monkeypatch):
    monkeypatch.setattr(mpirun, "find", lambda _: found)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    planned = make_plan(Options(COMMAND, ranks=2, hosts="localhost:2"))
    assert planned.mpirun is None
    assert message in planned.notices[0]
    with pytest.raises(LaunchError, match=f'{message}.*pip install "ring_plugins\\[mpi\\]"'):
        make_plan(Options(COMMAND, ranks=2, hosts="far:2"))
    with pytest.raises(LaunchError, match=message):
        make_plan(Options(COMMAND, ranks=2, starter="mpirun"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(()), "nothing to run"),
        (Options(COMMAND, ranks=0), "-n 0"),
        (Options(COMMAND, hosts="a", hostfile="b"), "-H and --hostfile"),
        (Options(COMMAND, hosts="far:2", starter="python"), "on this host only"),
        (Options(COMMAND, ranks=5, bind="core"), "--bind core: 5 ranks on 4 cores"),
        (Options(("no-such-program",)), "no program 'no-such-program'"),
    ],
)
def test_wrong_options_are_rejected(options, message):
    with pytest.raises((ArgumentError, LaunchError), match=message):
        make_plan(options)


def test_a_script_that_is_no_program_is_run_by_this_python(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    assert mpirun.resolve_program([str(script), "-v"]) == (sys.executable, str(script), "-v")
    assert mpirun.resolve_program(["sh", "-c", "x"])[0].endswith("/sh")


@pytest.mark.parametrize("words", [["python"], ["python3", "-", "a"], ["python", "-u", "-"]])
def test_a_python_that_reads_its_script_from_standard_input_is_rejected(words):
    with pytest.raises(LaunchError, match="reads its script from standard input.* save the script as a file"):
        mpirun.resolve_program(words)


@pytest.mark.parametrize("words", [["-c", "x", "-"], ["-mpackage", "-"], ["train.py", "-"], ["-V"]])
def test_a_python_with_a_script_is_not(words):
    assert mpirun.resolve_program([sys.executable, *words]) == (sys.executable, *words)


def test_threads_and_oversubscription_follow_the_smallest_host():
    shares = (Share("a", 2), Share("b", 2))
    job = JobSpec(("/bin/true",), 4, shares, environment={"OMP_NUM_THREADS": "9"})
    planned = LaunchPlan(job, None, ("they take turns",), provisional=("they take turns",))
    adapted = adapt(planned, {"a": 16, "b": 4})
    assert (adapted.job.environment, adapted.job.oversubscribed) == ({"OMP_NUM_THREADS": "2"}, False)
    assert adapted.notices == ()
    assert adapt(replace(planned, provisional=()), {"a": 16, "b": 4}).notices == planned.notices
    oversubscribed = adapt(planned, {"a": 16, "b": 1})
    assert oversubscribed.job.oversubscribed
    assert "2 ranks share 1 cores of b" in oversubscribed.notices[0]


def test_a_job_that_goes_on_after_losses_is_started_without_mpirun():
    planned = make_plan(Options(COMMAND, ranks=3, on_failure="continue", min_ranks=2))
    assert planned.mpirun is None and planned.recovers
    variables = {"RING_ON_FAILURE": "continue", "RING_LOSSES_TOLERATED": "1", "RING_MIN_RANKS": "2"}
    assert planned.job.environment.items() >= variables.items()
    assert not planned.replaces
    replacing = make_plan(Options(COMMAND, ranks=3, on_failure="replace"))
    assert replacing.recovers and replacing.replaces and replacing.standbys == 0
    growing = make_plan(Options(COMMAND, ranks=3, on_failure="replace", standbys=2, max_ranks=4))
    assert (growing.standbys, growing.max_ranks, growing.job.environment["RING_MAX_RANKS"]) == (2, 4, "4")
    between = make_plan(Options(COMMAND, hosts="far1:2,far2:2", on_failure="replace", max_ranks=6))
    assert between.hosts == ("far1", "far2") and between.max_ranks == 6
    assert replacing.job.environment["RING_ON_FAILURE"] == "replace"
    ordinary = make_plan(Options(COMMAND, ranks=3))
    assert not ordinary.recovers and not ordinary.job.environment.keys() & variables.keys()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hosts": "far1:2", "on_failure": "replace", "standbys": 1}, "--standbys 1 works on this host only"),
        ({"hosts": "far1:2", "on_failure": "replace", "max_ranks": 257}, "--max-ranks 257 is not between the 2 .* 256"),
        ({"starter": "mpirun"}, "does not work with mpirun"),
        ({"mpirun": "/opt/mpirun"}, "does not work with mpirun"),
        ({"ranks": 2, "min_ranks": 3}, "--min-ranks 3 is not between 1 and the 2 ranks"),
        ({"ranks": 2, "min_ranks": 0}, "--min-ranks 0 is not between"),
        ({"ranks": 2, "min_ranks": 2, "on_failure": "end"}, "--min-ranks 2 needs --on-failure continue or replace"),
        ({"ranks": 2, "standbys": 1}, "--standbys 1 needs --on-failure replace"),
        (
            {"ranks": 2, "on_failure": "replace", "standbys": 1000},
            "--standbys 1000 is more than the 2 ranks whose places",
        ),
        ({"ranks": 2, "standbys": -1}, "--standbys -1 is not a number of processes"),
        ({"ranks": 2, "max_ranks": 4}, "--max-ranks 4 needs --on-failure replace"),
        ({"ranks": 4, "max_ranks": 2, "on_failure": "replace"}, "--max-ranks 2 is not between the 4 ranks"),
        ({"ranks": 1, "max_ranks": 2, "on_failure": "replace"}, "a job of one rank cannot grow"),
    ],
)
def test_where_losses_cannot_be_tolerated_the_plan_says_so(options, text):
    with pytest.raises(ArgumentError, match=text):
        make_plan(Options(COMMAND, **{"on_failure": "continue", **options}))


def test_variables_that_training_reads_are_exported():
    here = {
        "RING_TIMEOUT": "5", "NCCL_DEBUG": "INFO", "KERAS_BACKEND": "jax", "XLA_FLAGS": "", "PYTHONPATH": "/here",
        "HOME": "/root", "SSH_AUTH_SOCK": "/tmp/x", "RING_SPAWNED": "3:1:2:9", "MINE": "1",
    }  # fmt: skip
    found = exported_variables(["MINE", "YOURS=2"], 3, "eth0", here)
    assert found == {
        "KERAS_BACKEND": None, "NCCL_DEBUG": None, "PYTHONPATH": None, "RING_TIMEOUT": None, "XLA_FLAGS": None,
        "OMP_NUM_THREADS": "3", "RING_INTERFACE": "eth0", "NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0",
        "MINE": None, "YOURS": "2",
    }  # fmt: skip
    assert set(exported_variables([], 3, "10.2.0.0/16", {})) == {"OMP_NUM_THREADS", "RING_INTERFACE"}
    said_by_the_user = {"OMP_NUM_THREADS": "7", "NCCL_SOCKET_IFNAME": "ib0"}
    kept = exported_variables([], 3, "eth0", said_by_the_user)
    assert kept["OMP_NUM_THREADS"] is None
    assert kept["NCCL_SOCKET_IFNAME"] is None
    with pytest.raises(ArgumentError, match="-x NOWHERE: NOWHERE is not set here"):
        exported_variables(["NOWHERE"], 1, None, {})
