import os

import pytest

from ring_plugins.core import rendezvous as launch
from ring_plugins.core.base.errors import RingError
from tests.launchers import FOREIGN_NAMES, FOREIGN_PREFIXES

RENDEZVOUS = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77",
         "SLURM_STEP_NODELIST": "rack[03-07,12]-gpu", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}  # fmt: skip


@pytest.fixture(autouse=True)
def _single(monkeypatch):
    for name in list(os.environ):
        if name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES:
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("single", 0, 1, 0)),
        (OPEN_MPI, ("mpi", 1, 4, 1)),
        (MPICH, ("mpi", 1, 4, 0)),
        (RENDEZVOUS, ("rendezvous", 3, 8, 1)),
        (SLURM, ("rendezvous", 5, 8, 1)),
        ({"RING_SPAWNED": "3:1:2:99"}, ("spawned", 1, 2, 1)),
        # mpirun inside a SLURM allocation: the inner launcher counts.
        ({**SLURM, **OPEN_MPI}, ("mpi", 1, 4, 1)),
        # one torchrun agent a host, started by mpirun
        ({**OPEN_MPI, **RENDEZVOUS, "TORCHELASTIC_RUN_ID": "x"}, ("rendezvous", 3, 8, 1)),
        # a shell inside an allocation is not a task
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, ("single", 0, 1, 0)),
        ({**OPEN_MPI, "RING_LAUNCHER": "single"}, ("single", 0, 1, 0)),
        ({**OPEN_MPI, "RING_LAUNCHER": "alone"}, ("single", 0, 1, 0)),  # its name in earlier releases
    ],
)
def test_the_launcher_is_detected(environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    record = launch.detect()
    assert (record.kind, record.rank, record.size, record.local_rank) == expected


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RING_LAUNCHER": "pvm"}, "RING_LAUNCHER='pvm'"),
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


def test_slurm_tasks_agree_on_a_port_without_talking(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    variables = launch.detect().variables
    assert (variables["MASTER_ADDR"], variables["RANK"], variables["WORLD_SIZE"]) == ("rack03-gpu", "5", "8")
    assert 15000 <= int(variables["MASTER_PORT"]) < 30000
