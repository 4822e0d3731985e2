"""The table of launchers: one entry is all that a launcher needs."""

import os
from dataclasses import replace

import pytest

from ring_plugins.core import rendezvous as launch
from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.members import policy
from ring_plugins.core.members.policy import FailurePolicy, prepare_to_continue
from ring_plugins.core.rendezvous import detection, launchers, tcp
from ring_plugins.core.rendezvous.record import Launcher, LaunchRecord, Loss, Rendezvous, integer


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
        child.setattr(detection.os, "getpid", lambda: -1)
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
