"""The table of launchers: one entry is all that a launcher needs."""

import os
from dataclasses import replace

import pytest

from ring_plugins.core import rendezvous as launch
from ring_plugins.core.base.errors import ArgumentError, LaunchError, RingError
from ring_plugins.core.members import policy
from ring_plugins.core.members.policy import FailurePolicy, prepare_to_continue
from ring_plugins.core.rendezvous import launchers, tcp
from ring_plugins.core.rendezvous.record import Launcher, LaunchRecord, Loss, Rendezvous, integer
from tests.launchers import FOREIGN_NAMES, FOREIGN_PREFIXES


def find_made_up(launcher):
    """As a launcher would that sets no RANK, but tells where the first task is."""
    rank, size = integer("MADEUP_TASK"), integer("MADEUP_TASKS")
    if rank is None:
        return None
    master = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": os.environ["MADEUP_FIRST"], "MASTER_PORT": "9"}
    return LaunchRecord(launcher, rank, size, variables=master)


MADE_UP = Launcher(
    "rendezvous",
    "madeup",
    find_made_up,
    tcp.connect,
    identity=("MADEUP_JOB", "MADEUP_TASK"),
    variables=("MADEUP_",),
    kept=("MADEUP_JOB",),
    uses_master=True,
    half_started=lambda ranks: "MADEUP_JOB is set, but madeup has not started it" if "MADEUP_JOB" in os.environ else "",
)
ENVIRONMENT = {"MADEUP_TASK": "1", "MADEUP_TASKS": "2", "MADEUP_FIRST": "host1", "MADEUP_JOB": "7"}


@pytest.fixture
def made_up(monkeypatch):
    """A launcher that has one entry, and a process that it has started."""
    for name in launchers.identity():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RING_MEMBER", "")  # so that it is removed at the end
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def add(launcher):
        monkeypatch.setattr(launchers, "LAUNCHERS", (launcher, *launchers.LAUNCHERS))

    return add


def test_one_entry_is_all_that_a_launcher_needs(made_up, monkeypatch):
    made_up(replace(MADE_UP, connect=lambda record, *_: Rendezvous(1, 2, lambda one: [one] * 2, None)))
    record = launch.detect()
    assert (record.by, record.rank, record.size, record.variables["MASTER_ADDR"]) == ("madeup", 1, 2, "host1")
    assert launch.connect(None, 0).rank == 1
    assert launch.launcher_of(2).name == "madeup"
    assert launchers.without_launchers({**ENVIRONMENT, "RANK": "1", "HOME": "/"}) == {"MADEUP_JOB": "7", "HOME": "/"}
    with monkeypatch.context() as child:
        child.setattr(launchers.os, "getpid", lambda: -1)
        with pytest.raises(LaunchError, match="inherited the variables of madeup from rank 1"):
            launch.connect(None, 0)
    monkeypatch.delenv("MADEUP_TASK")
    with pytest.raises(LaunchError, match="madeup has not started it; RING_LAUNCHER=single makes it a job of its own"):
        launch.connect(None, 0)


def test_the_entry_says_what_becomes_of_a_job_that_loses_a_rank(made_up, monkeypatch):
    continues = FailurePolicy(True, 1)
    made_up(MADE_UP)
    with pytest.raises(ArgumentError, match="does not work under madeup, which may end all ranks"):
        prepare_to_continue(None, continues, 0)
    made_up(replace(MADE_UP, at_loss=Loss.NOTHING))
    prepare_to_continue(None, continues, 0)
    with pytest.raises(ArgumentError, match="needs somebody who starts processes"):
        prepare_to_continue(None, FailurePolicy(True, 1, True), 0)
    anew = []
    monkeypatch.setattr(policy, "restart_under_supervisors", lambda record, *_: anew.append(record.by))
    made_up(replace(MADE_UP, at_loss=Loss.STARTS_ANEW))
    prepare_to_continue(None, continues, 0)
    assert anew == ["madeup"]
    made_up(replace(MADE_UP, at_loss=Loss.AS_TOLD))
    with pytest.raises(ArgumentError, match="does not work under madeup"):
        prepare_to_continue(None, continues, 0)
    monkeypatch.setenv("RING_LOSSES_TOLERATED", "1")
    prepare_to_continue(None, continues, 0)


def test_ranks_get_no_variable_that_tells_a_process_of_the_launcher_who_it_is():
    theirs = {
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "PMI_FD",
        "RANK",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
        "SLURM_PROCID",
    }
    kept = {"PATH", "SLURM_JOB_ID", "RING_TIMEOUT", "OMP_NUM_THREADS", "OMPI_ALLOW_RUN_AS_ROOT", "I_MPI"}
    found = launchers.without_launchers(dict.fromkeys([*theirs, *kept, "RING_LAUNCHER", "SLURM_NTASKS"], "1"))
    assert set(found) == kept


RENDEZVOUS = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77",
         "SLURM_STEP_NODELIST": "rack[03-07,12]-gpu", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}  # fmt: skip

ONE_TASK = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
IN_SALLOC = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}


@pytest.fixture(autouse=True)
def _single(monkeypatch):
    for name in list(os.environ):
        if name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES:
            monkeypatch.delenv(name)


def connect_by(monkeypatch, rendezvous):
    """Let ranks of each launcher have what `rendezvous` returns for it."""
    table = [replace(one, connect=lambda record, *_: rendezvous(record.launcher)) for one in launchers.LAUNCHERS]
    monkeypatch.setattr(launchers, "LAUNCHERS", table)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("single", 0, 1, 0)),
        (OPEN_MPI, ("mpi", 1, 4, 1)),
        (MPICH, ("mpi", 1, 4, 0)),
        (RENDEZVOUS, ("rendezvous", 3, 8, 1)),
        (SLURM, ("slurm", 5, 8, 1)),
        ({"RING_SPAWNED": "3:1:2:99:2"}, ("spawned", 1, 2, 1)),
        # mpirun inside a SLURM allocation: the inner launcher counts.
        ({**SLURM, **OPEN_MPI}, ("mpi", 1, 4, 1)),
        # one torchrun agent a host, started by mpirun
        ({**OPEN_MPI, **RENDEZVOUS, "TORCHELASTIC_RUN_ID": "x"}, ("rendezvous", 3, 8, 1)),
        # a shell inside an allocation is not a task
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, ("single", 0, 1, 0)),
        # a single task is a job of one, whether asked for or found
        ({**SLURM, **ONE_TASK}, ("single", 0, 1, 0)),
        ({**SLURM, **ONE_TASK, "RING_LAUNCHER": "slurm"}, ("single", 0, 1, 0)),
        ({**OPEN_MPI, "RING_LAUNCHER": "single"}, ("single", 0, 1, 0)),
        ({**OPEN_MPI, "RING_LAUNCHER": "alone"}, ("single", 0, 1, 0)),  # its name in earlier releases
    ],
)
def test_the_launcher_is_detected(environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    record = launch.detect()
    assert (str(record.launcher), record.rank, record.size, record.local_rank) == expected


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RING_LAUNCHER": "pvm"}, "RING_LAUNCHER='pvm'"),
        ({"RING_LAUNCHER": "rendezvous", "RANK": "0", "MASTER_ADDR": "a"}, "are missing: WORLD_SIZE, MASTER_PORT"),
        ({"RING_LAUNCHER": "mpi"}, "the variables that mpi sets are missing"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK='one'"),
        ({"RING_SPAWNED": "nonsense"}, "RING_SPAWNED='nonsense'"),
    ],
)
def test_a_contradictory_environment_is_named(environment, said, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RingError, match=said):
        launch.detect()


HALF_SET = [
    ({"RANK": "0"}, "RANK=0 is set, but WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 and WORLD_SIZE=2 are set, but MASTER_ADDR and MASTER_PORT are not"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but RANK and"),
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "but MASTER_PORT is not"),
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": ""}, "but MASTER_PORT is not"),
    ({"RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}, "RANK=1 is set, but WORLD_SIZE is not"),
    ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1 and WORLD_SIZE=1 are set, but MASTER_ADDR and MASTER_PORT are not"),
]


@pytest.mark.parametrize("wanted", [None, 2])
@pytest.mark.parametrize(("environment", "said"), HALF_SET)
def test_a_half_set_rendezvous_is_rejected(environment, said, wanted, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=said) as caught:
        launch.connect(wanted, 0)
    assert all(
        f"unset {names}" in str(caught.value)
        for names in [" and ".join(n for n in ("RANK", "WORLD_SIZE") if n in environment)]
    )
    monkeypatch.setenv("RING_LAUNCHER", "single")
    assert launch.connect(None, 0).size == 1


@pytest.mark.parametrize(
    "environment",
    [IN_SALLOC, {**IN_SALLOC, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}],
)
def test_an_allocation_without_srun_is_rejected(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"SLURM allocated 8 tasks .* srun did not start it"):
        launch.connect(None, 0)
    assert launch.connect(1, 0).size == 1  # the script says how many it wants


@pytest.mark.parametrize(
    "environment",
    [
        {"MASTER_ADDR": "a", "MASTER_PORT": "1234"},  # set for good on some clusters
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0"},
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "77"},
    ],
)
def test_a_process_that_is_alone_anyway_is_not_rejected(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launch.connect(None, 0).size == 1


@pytest.mark.parametrize("environment", [OPEN_MPI, MPICH, RENDEZVOUS, SLURM])
def test_a_child_of_a_rank_is_not_the_rank(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    joined = Rendezvous(3, 8, lambda payload: [payload] * 8, None)
    connect_by(monkeypatch, lambda launcher: joined)
    monkeypatch.setenv("RING_MEMBER", "")  # so that it is removed at the end
    launch.connect(None, 0)
    launch.connect(None, 1)  # after `shutdown`, or after exec
    monkeypatch.setattr(launchers.os, "getpid", lambda: -1)
    with pytest.raises(
        LaunchError,
        match=rf"inherited the variables of .* from rank 3 \(process {os.environ['RING_MEMBER'].split()[0]}\)",
    ):
        launch.connect(None, 0)
    with monkeypatch.context() as without:
        without.setenv("RING_MEMBER", os.environ["RING_MEMBER"])  # so that it comes back
        launchers.leave(launch.detect().launcher)  # the next stage of a script may be a child, except under MPI
        if launch.detect().launcher.uses_mpi:
            assert os.environ["RING_MEMBER"]
        else:
            assert launch.connect(None, 0) is joined
    monkeypatch.setenv("MASTER_PORT", "4321")  # a job that the rank starts is another one
    monkeypatch.setenv("PMIX_NAMESPACE", "another")
    assert launch.connect(None, 0) is joined


def test_another_number_of_ranks_than_asked_for_is_said_at_the_caller_of_init(monkeypatch):
    for name, value in RENDEZVOUS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RING_MEMBER", "")
    alone = Rendezvous(0, 1, lambda payload: [payload], None)
    connect_by(monkeypatch, lambda launcher: alone)

    def init():
        launch.connect(2, 0)

    with pytest.warns(UserWarning, match="started 1 rank: using that") as caught:
        init()
    assert caught[0].filename == __file__


def test_a_child_of_an_mpi_rank_joins_the_job_whose_rank_it_was_given(monkeypatch):
    """MPI would wait for ever for a process that claims to be a rank that it has already."""
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    joined, own = (Rendezvous(rank, 8, lambda payload: [payload] * 8, None) for rank in (3, 1))
    connect_by(monkeypatch, lambda launcher: joined if launcher.uses_mpi else own)
    monkeypatch.setenv("RING_MEMBER", "")
    assert launch.connect(None, 0) is joined
    monkeypatch.setattr(launchers.os, "getpid", lambda: -1)
    monkeypatch.setenv("MASTER_PORT", "4321")
    with pytest.raises(LaunchError, match="is a child of it"):  # no rank of another job
        launch.connect(None, 0)
    for name, value in {**RENDEZVOUS, "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launch.connect(None, 0) is own
    monkeypatch.setenv("PMIX_NAMESPACE", "another")  # mpirun, with these variables set for good
    monkeypatch.setenv("RING_MEMBER", "17 0 1 2")
    assert launch.connect(None, 0) is joined


def test_slurm_tasks_agree_on_a_port_without_talking(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    variables = launch.detect().variables
    assert (variables["MASTER_ADDR"], variables["RANK"], variables["WORLD_SIZE"]) == ("rack03-gpu", "5", "8")
    assert 15000 <= int(variables["MASTER_PORT"]) < 30000
