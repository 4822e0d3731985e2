"""Groups of ranks: in one process, and `checks_groups.py` on several, on one host and between test hosts."""

import copy
import pickle
from pathlib import Path

import pytest

import ring_plugins as ring
from ring_plugins.core import groups
from tests.launch import run_ranks

CHECKS = Path(__file__).with_name("checks_groups.py")


@pytest.fixture
def job():
    ring.init()
    yield
    ring.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started_by", "processes", "nodes"),
    [("spawned", 4, ""), ("spawned", 5, ""), ("mpirun", 4, "2"), ("mpirun", 5, "1,2,2"), ("exported", 3, "2,1")],
)
def test_groups(started_by, processes, nodes):
    env = {"RING_VIRTUAL_NODES": nodes} if nodes else {"TEST_DEADLOCK": "1"}
    result = run_ranks(CHECKS, processes, started_by, env=env, timeout=150)
    for rank in range(processes):
        assert {said for name, said in result.reports[rank].items()} == {"ok"}


@pytest.mark.parametrize("given", [[0, 0], [1], [-1], [True], ["0"], 0, [0.0]])
def test_ranks_are_distinct_ranks_of_the_job(job, given):
    with pytest.raises(ring.ArgumentError, match="are not distinct ranks of a job of 1"):
        ring.Group(given)


def test_a_job_of_one_rank_has_groups_too(job):
    group = ring.Group.split("all")
    assert (group.ranks, group.rank, group.size, repr(group)) == ((0,), 0, 1, "<group of rank 0>")
    assert ring.all_gather_object("mine", group=group) == ["mine"]
    assert ring.Group.of(group) is group
    nobody = ring.Group([])
    assert (nobody.rank, nobody.size) == (None, 0)
    with pytest.raises(ring.ArgumentError, match="rank 0 is not in the empty group"):
        ring.all_reduce(1.0, group=nobody)


def test_what_is_not_a_group_is_rejected(job):
    with pytest.raises(ring.ArgumentError, match=r"group=\[0\] is not a ring_plugins.Group; make one by"):
        ring.all_reduce(1.0, group=[0])
    with pytest.raises(ring.ArgumentError, match="builtins.str is not a group that ring_plugins knows"):
        ring.Group.of("world")
    with pytest.raises(ring.ArgumentError, match="color must be hashable"):
        ring.Group.split([1])
    with pytest.raises(ring.ArgumentError, match="key a whole number"):
        ring.Group.split(1, "first")
    for color in (float("nan"), object()):  # which would be in no group, and nobody would hear of it
        with pytest.raises(ring.ArgumentError, match="does not equal its copy, which is what other ranks get of it"):
            ring.Group.split(color)


def test_a_group_is_a_connection_which_copies_share_and_nobody_sends(job):
    group = ring.Group({0})
    assert copy.copy(group) is group and copy.deepcopy([group]) == [group]
    with pytest.raises(ring.ArgumentError, match=r"the group of rank 0 cannot be pickled .* pass on \[0\], and call"):
        pickle.dumps({"group": group})


def test_a_group_ends_with_close_and_with_its_job(job):
    closed, earlier = ring.Group([0]), ring.Group([0])
    closed.close()
    with pytest.raises(
        ring.RingError, match="rank 0 uses the group of rank 0 after it has been closed: make one again"
    ):
        ring.all_reduce(1.0, group=closed)
    ring.shutdown()
    ring.init()
    with pytest.raises(ring.RingError, match=r"rank 0 uses the group of rank 0 after shutdown\(\): make one again"):
        ring.all_reduce(1.0, group=earlier)


def test_a_plugin_reads_the_groups_of_its_framework(job, monkeypatch):
    monkeypatch.setattr(groups, "group_readers", [lambda other: None, lambda other: other["ranks"]])
    assert ring.Group.of({"ranks": [0]}).ranks == (0,)


@pytest.mark.slow
def test_a_group_of_all_ranks_is_named_too_where_others_make_another():
    script = """
        import ring_plugins as ring
        from tests.worker import report
        ring.init(ranks=2)
        try:
            ring.Group([0, 1] if ring.rank() == 0 else [1, 0])
        except ring.DeadlockError as error:
            text = "in the construction of group of ranks"
            report("names", [f"{text} {order}" in str(error) for order in ("0, 1", "1, 0")])
    """
    assert run_ranks(script, 2).values("names") == [[True, True]] * 2


@pytest.mark.slow
def test_a_group_of_some_ranks_is_refused_where_ranks_may_be_lost_and_one_of_all_heals():
    script = """
        import os, signal, pytest, ring_plugins as ring
        from tests.worker import report
        ring.init(ranks=3, on_failure="continue")
        every = ring.Group(range(3))
        with pytest.raises(ring.ArgumentError, match='ring_plugins.Group, unless of all ranks in order, .*"continue"'):
            ring.Group([0, 1])
        ring.barrier(group=every)
        if ring.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        report("sum", float(ring.all_reduce(1.0, ring.SUM, group=every)))
        report("place", [every.rank, every.size, list(every.ranks), float(ring.broadcast(ring.rank(), 1, group=every))])
    """
    result = run_ranks(script, 3, timeout=100, check=False)
    assert result.values("sum") == [2.0, 2.0]
    assert result.values("place") == [[0, 2, [0, 1], 1.0], [1, 2, [0, 1], 1.0]]


@pytest.mark.slow
def test_a_killed_member_is_named_by_the_others_and_by_ranks_outside():
    script = """
        import os, signal, ring_plugins as ring
        from tests.worker import report
        ring.init(ranks=4)
        mine = ring.Group([0, 2] if ring.rank() % 2 == 0 else [1, 3])
        ring.barrier(group=mine)
        if ring.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                ring.all_reduce(1.0, group=mine)
        except ring.PeerFailed as error:
            report("failed", error.rank)
            raise
    """
    result = run_ranks(script, 4, timeout=100, check=False)
    assert result.returncode != 0
    assert result.reports[0]["failed"] == 2
