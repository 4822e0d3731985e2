"""Joining and leaving, in a job of one rank."""

import pytest

from ring_plugins.core import world
from ring_plugins.core.base import log
from ring_plugins.core.base.errors import ArgumentError, NotInitialized
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.observe.timeline import FILE_NAME
from ring_plugins.core.rendezvous import Rendezvous
from tests.launch import run_ranks


@pytest.fixture
def single(monkeypatch):
    """A world of one rank, and a list that grows when its rendezvous closes."""
    closed = []
    monkeypatch.setattr(world, "_world", None)
    rendezvous = Rendezvous(0, 1, lambda item: [item], None, close=lambda: closed.append(1))
    monkeypatch.setattr(world, "connect", lambda ranks, generation: rendezvous)
    yield world.init(), closed
    world.shutdown()


def test_init_again_changes_nothing(single):
    made, _ = single
    assert world.init() is made is world.current()
    assert (str(made.launcher), made.topology.rank, made.topology.size) == ("single", 0, 1)
    assert isinstance(made.communicator, SingleCommunicator) and made.failure_detector is None


def test_init_again_must_want_the_same(single, monkeypatch):
    made, _ = single
    assert world.init(1) is world.init(on_failure="end") is world.init(1, on_failure="end") is made
    with pytest.raises(ArgumentError) as found:
        world.init(4, on_failure="continue", min_ranks=3)
    assert str(found.value).startswith(
        "init(on_failure='continue', min_ranks=3, ranks=4): init() was called before with on_failure='end' "
        "and no min_ranks and ranks=1, and a job does not change by another call. Pass all of it to the first"
    )
    for wrong, text in (({"max_ranks": 2}, "no max_ranks"), ({"on_failure": "go on"}, 'must be "end", "cont')):
        with pytest.raises(ArgumentError, match=text):
            world.init(**wrong)
    monkeypatch.setenv("RING_ON_FAILURE", "continue")
    with pytest.raises(ArgumentError, match=r"RING_ON_FAILURE='continue': .* no RING_ON_FAILURE,"):
        world.init()
    world.shutdown()
    assert world.init() is not made  # the first call of another job


def test_what_the_first_init_was_given_may_be_said_again(monkeypatch):
    """Also the defaults, what a variable says, a part of it, and a number of ranks that the launcher overruled."""
    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setattr(world, "connect", lambda ranks, generation: Rendezvous(0, 1, lambda item: [item], None))
    monkeypatch.setattr(world, "prepare_to_continue", lambda ranks, policy, generation: None)
    monkeypatch.setenv("RING_ON_FAILURE", "continue")
    made = world.init(3)
    again = [{"ranks": 1}, {"ranks": 3, "on_failure": "continue"}, {"min_ranks": 1}, {}]
    assert all(world.init(**options) is made for options in again)
    world.shutdown()


def test_a_timeline_that_cannot_be_written_is_rejected_even_for_root(monkeypatch, tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setenv("RING_TIMELINE", str(tmp_path))
    monkeypatch.setenv("RING_LAUNCHER", "single")
    with pytest.raises(ArgumentError, match=r"RING_TIMELINE=.*: rank 0 cannot write there \(Is a directory\)") as found:
        world.init(ranks=2)
    assert found.value.__suppress_context__, "one traceback"


def test_a_misspelled_variable_is_named_once(monkeypatch, capsys):
    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setattr(world, "_generation", 0)
    monkeypatch.setattr(world, "connect", lambda ranks, generation: Rendezvous(0, 1, lambda item: [item], None))
    monkeypatch.setenv("RING_TIMEOUTS", "5")
    monkeypatch.setenv("RING_XYLOPHONE", "1")  # of another program
    for _ in range(2):
        world.init()
        world.shutdown()
    said = capsys.readouterr().err
    assert said.count("RING_TIMEOUTS is set, but ring_plugins does not read it. Did you mean RING_TIMEOUT?") == 1
    assert "XYLOPHONE" not in said


def test_shutdown_closes_the_rendezvous_once(single):
    made, closed = single
    assert log._rank == 0
    world.shutdown()
    made.close()
    assert closed == [1] and log._rank is None
    assert not world.is_initialized()
    with pytest.raises(NotInitialized, match=r"call ring_plugins.init\(\), or hvd.init\(\), before this"):
        world.current()


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True])
def test_an_invalid_number_of_ranks_is_rejected(number):
    with pytest.raises(ArgumentError, match="ranks="):
        world.init(ranks=number)


SWEEP = """
import gc, os, threading
import numpy as np
import torch
import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer
from tests.worker import report

def held():
    with open("/proc/self/maps") as maps:
        shared = sum("/dev/shm/" in line or "memfd:" in line for line in maps)
    return [len(os.listdir("/proc/self/fd")), threading.active_count(), shared]

ranks, found = int(os.environ["TEST_RANKS"]), []
for run in range(100):
    ring.init(ranks=ranks)
    assert ring.all_reduce(np.full(1000, ring.rank() + 1.0), ring.SUM)[0] == ranks * (ranks + 1) / 2
    model = torch.nn.Linear(2, 2)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    model(torch.randn(2, 2)).sum().backward()
    optimizer.step()
    if run % 2:
        optimizer.close()
    del optimizer
    ring.shutdown()
    gc.collect()
    found.append(held())
report("held", [found[9], found[-1]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_hundred_jobs_in_one_process_leave_nothing(count):
    for early, late in run_ranks(SWEEP, count, timeout=300).values("held"):
        assert all(now <= then for then, now in zip(early, late, strict=True)), (early, late)
