"""mpirun, for which a shell stands here, is ended if it goes on after its job; see openpmix/prrte#1839."""

import os
from types import SimpleNamespace

import pytest

from ring_plugins.launcher import lingering
from ring_plugins.launcher.lingering import LingeringMpirun
from ring_plugins.launcher.supervision import Supervisor

#: Starts a rank, waits for it, and then for nothing.
LINGERS = "sh -c 'exec sleep 0.3' & wait; exec sleep 3600"


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(lingering, "_LOOK_EVERY", 0.0)
    monkeypatch.setattr(lingering, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(lingering, "FAILED_SECONDS", 0.2)


def wait_for(script, is_local, failure=lambda: None):
    with Supervisor() as supervisor:
        process = supervisor.start(["sh", "-c", script], os.environ)
        return supervisor.wait(LingeringMpirun(process.pid, is_local, failure))


def test_it_is_ended_on_one_host_when_nothing_below_it_is_alive():
    status, why = wait_for(LINGERS, is_local=True)
    assert status != 0  # nobody knows how the ranks ended
    assert (
        why == "mpirun still ran 0.2 s after the last of its processes had ended; ended it. How they ended is unknown."
    )


def test_it_is_ended_on_several_hosts_after_a_failure():
    status, why = wait_for("sleep 3600; true", is_local=False, failure=lambda: "rank 1 failed")
    assert (status != 0, why) == (True, "mpirun still ran 0.2 s after a rank had failed; ended it.")


@pytest.mark.parametrize(("alive", "is_local"), [(True, True), (False, False), (None, True)])
def test_it_goes_on_while_ranks_may_run(monkeypatch, alive, is_local):
    """While some run here; while they may run on other hosts; before any has started."""
    first = [alive is not None]  # whether any was alive at first
    monkeypatch.setattr(lingering, "children", dict)
    monkeypatch.setattr(lingering, "descendants", lambda pid, family: [1] if alive or (first and first.pop()) else [])
    monkeypatch.setattr(lingering, "state", lambda pid: "S")
    monkeypatch.setattr(lingering, "time", SimpleNamespace(monotonic=iter(range(1, 1000)).__next__))
    lingers = LingeringMpirun(1, is_local, lambda: None)
    assert [lingers() for _ in range(500)] == [None] * 500
