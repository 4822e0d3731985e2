"""Processes of multiprocessing do not join in the place of their rank; ranks with variables of their own do."""

import multiprocessing
import os

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.rendezvous import claim
from ring_plugins.core.rendezvous.claim import RankMarker, check_ancestors
from ring_plugins.core.rendezvous.launchers import identity

NAMES = identity()


@pytest.fixture
def held(monkeypatch):
    """This process is rank 3 of a job that mpirun started."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    held = RankMarker(3)
    yield held
    held.release()


def _check_as_a_new_rank(changes, answers):
    os.environ.update(changes)
    try:
        check_ancestors(NAMES)
        answers.send("joins")
    except LaunchError as error:
        answers.send(str(error))


@pytest.mark.parametrize(("changes", "joins"), [({}, False), ({"RANK": "1"}, True)])
def test_a_process_of_multiprocessing_joins_only_with_variables_of_its_own(held, changes, joins):
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_check_as_a_new_rank, args=(changes, sender))
    process.start()
    answer = receiver.recv()
    process.join()
    assert (answer == "joins") == joins
    if not joins:
        assert answer.startswith("this process is a child of rank 3") and "if __name__ ==" in answer


def test_after_the_job_the_ranks_processes_are_free(held, monkeypatch):
    monkeypatch.setattr(claim, "_environment_at_start", lambda: os.environ)
    monkeypatch.setattr(claim, "is_multiprocessing_child", lambda: True)
    monkeypatch.setattr(os, "getppid", os.getpid)
    with pytest.raises(LaunchError, match="child of rank 3"):
        check_ancestors(NAMES)
    held.release()
    check_ancestors(NAMES)


def test_only_the_original_script_spawns_ranks(monkeypatch):
    claim.check_is_original_script()
    monkeypatch.setattr(claim, "is_multiprocessing_child", lambda: True)
    with pytest.raises(LaunchError, match="started by multiprocessing"):
        claim.check_is_original_script()
