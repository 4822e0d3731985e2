"""All collectives, on one to four ranks, under every launcher, on one host and on several virtual ones."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from tests.core.collectives.thread_ranks import on_thread_ranks
from tests.launch import run_ranks

CHECKS = Path(__file__).with_name("checks_host.py")

CASES = [
    ("spawned", 1, ""),
    ("spawned", 2, ""),
    pytest.param("spawned", 3, "", marks=pytest.mark.slow),
    pytest.param("spawned", 4, "", marks=pytest.mark.slow),
    ("mpirun", 2, ""),
    pytest.param("mpirun", 2, "2", marks=pytest.mark.slow),
    pytest.param("mpirun", 3, "1,2", marks=pytest.mark.slow),
    ("mpirun", 4, "2"),
    pytest.param("exported", 3, "2,1", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("started_by", "processes", "nodes"), CASES)
def test_collectives(started_by, processes, nodes):
    result = run_ranks(CHECKS, processes, started_by, env={"RING_VIRTUAL_NODES": nodes} if nodes else {}, timeout=150)
    for rank in range(processes):
        failed = {name: said for name, said in result.reports[rank].items() if said != "ok" and name != "place"}
        assert not failed
    places = result.values("place")
    assert [place["rank"] for place in places] == list(range(processes))
    assert {place["size"] for place in places} == {processes}
    if nodes == "1,2":
        seen = [(p["node_rank"], p["local_rank"], p["local_size"], p["num_nodes"]) for p in places]
        assert seen == [(0, 0, 1, 2), (1, 0, 2, 2), (1, 1, 2, 2)]


@pytest.mark.slow
def test_more_than_two_gibibytes_in_one_call():
    script = """
        import os
        import numpy as np, ring_plugins as ring
        from tests.worker import report
        ring.init(ranks=2)
        x = np.full((1 << 31) + 12_345, ring.rank() + 1, np.uint8)
        ring.all_reduce(x, ring.SUM, out=x)
        report("sums", [int(x.min()), int(x.max())])
        x[:] = ring.rank()
        ring.broadcast(x, 1, out=x)
        report("broadcast", [int(x.min()), int(x.max())])
    """
    result = run_ranks(script, 2, "spawned", timeout=120)
    assert result.values("sums") == [[3, 3]] * 2
    assert result.values("broadcast") == [[1, 1]] * 2


class FailsOnArrival:
    def __reduce__(self):
        return int, ("no number",)


def test_what_cannot_be_pickled_or_loaded_is_an_error_of_ours():
    def run(rank, communicator):
        for call in (communicator.broadcast_object, communicator.all_gather_object):
            with pytest.raises(ArgumentError, match=f"a function of rank {rank} cannot be pickled"):
                call(lambda: rank, rank) if call == communicator.broadcast_object else call(lambda: rank)
        if rank == 0:
            with contextlib.suppress(RingError):  # rank 1 may break the communicator before this one is done
                communicator.broadcast_object(FailsOnArrival(), 0)
        else:
            with pytest.raises(RingError, match="cannot be loaded here .ValueError"):
                communicator.broadcast_object(None, 0)

    on_thread_ranks(2, run)


def test_a_message_overwrites_the_other_members_memory_and_sizes_and_tags_are_compared():
    def run(rank, communicator):
        data = np.arange(5.0) if rank == 1 else np.zeros(5)
        communicator.transfer(HostMemory(data, "float64"), 1, tag=3)
        assert data.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(MismatchError, match=r"rank 0 calls send/recv\(5 x float64, tag 0\).* rank 1 .*tag 1\)"):
            communicator.transfer(HostMemory(data, "float64"), 1, tag=rank)

    on_thread_ranks(2, run)
