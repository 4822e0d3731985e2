"""An exception that interrupts a construction on one rank, and that its script catches, reaches the ranks that wait."""

import re

import pytest

from tests.launch import run_ranks

COMMON = """
import gc, os, sys, time
from pathlib import Path
import ring_plugins as ring
from ring_plugins.core.collectives import host
from ring_plugins.core import world
from ring_plugins.core.control.liveness import LocalPeers
from ring_plugins.core.linux.shared_memory import Segment
from tests.worker import report
RANK = int(os.environ["RANK"])

class TimeIsUp(BaseException):
    pass

def interrupted(*args, **options):
    raise TimeIsUp("on rank 1")

opened = Segment.open

def open_late(address, rank):
    end = time.monotonic() + 30
    while os.path.lexists(f"/proc/{address[0]}/fd/{address[1]}") and time.monotonic() < end:
        time.sleep(0.01)
    return opened(address, rank)

def at(owner, name, once_gone=False):
    # Interrupts rank 1 there. `once_gone`: rank 0 opens the memory of rank 1 once that has let go of it.
    if RANK == 1:
        setattr(owner, name, interrupted)
    elif once_gone:
        Segment.open = open_late

def attempt(construct):
    try:
        construct()
        outcome = None
    except BaseException as error:
        outcome = [type(error).__name__, str(error)]
    report("outcome", outcome, RANK)
    gc.collect()  # what the exception held, such as memory that the other rank opens
    reports = Path(os.environ["TEST_REPORTS"])
    (reports / f"over-{RANK}").touch()
    end = time.monotonic() + 60
    while not (reports / f"over-{1 - RANK}").exists() and time.monotonic() < end:
        time.sleep(0.01)  # alive until the other has raised
    os._exit(1)  # which ends the job

"""

INIT = "at(host.HostGroups, 'connect'); attempt(lambda: (ring.init(), ring.barrier()))"
INIT_EARLIER = "at(LocalPeers, 'map', once_gone=True); attempt(ring.init)"
WORLD = "ring.init(); at({}); attempt(lambda: world.current().new_communicator('x').barrier())"
AVERAGER = """
from tests.campaigns.light_torch import import_torch
import_torch()
import torch, ring_plugins.torch as rt
ring.init(); at({})
attempt(lambda: rt.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)))
"""
GROUP = """
import torch.distributed as dist, ring_plugins.torch as rt
from ring_plugins.torch import backend
dist.init_process_group("ring"); at({})
attempt(lambda: dist.barrier(dist.new_group([0, 1])))
"""
CASES = {
    "init": (INIT, "rank 1 failed: .*TimeIsUp: on rank 1|ring: rank 1 was interrupted in its construction by TimeIsUp"),
    "init, before the ranks watch each other": (
        INIT_EARLIER,
        "rank 1 on .* ended while the ranks were starting up",
    ),
    "before the gather": (WORLD.format("host, 'create_segment'"), "rank 1 was interrupted in the construction of x"),
    "after the gather": (
        WORLD.format("host, 'SerialExecutor', once_gone=True"),
        "rank 1 was interrupted in the construction of x",
    ),
    "while connecting": (
        WORLD.format("host.HostGroups, 'connect'"),
        "x: rank 1 was interrupted in its construction by TimeIsUp|ring: rank 1 was interrupted in the construction",
    ),
    "an averager's buckets": (
        AVERAGER.format("rt.bucket_sets, 'GradientBuckets'"),
        "gradients: rank 1 was interrupted in the construction of a gradient averager by TimeIsUp",
    ),
    "a group's first exchange": (
        GROUP.format("backend.GroupStore, 'exchange'"),
        "process group .*: rank 1 could not construct it: TimeIsUp: on rank 1",
    ),
    "a group's communicator": (
        GROUP.format("host, 'SerialExecutor', once_gone=True"),
        "process group .*: rank 1 could not construct it: TimeIsUp: on rank 1",
    ),
}


#: What runs by default: each start takes 5 s.
QUICK = "init", "an averager's buckets"


@pytest.mark.parametrize(
    ("case", "nodes"),
    [
        pytest.param(case, nodes, marks=[pytest.mark.slow] * (bool(nodes) or case not in QUICK))
        for case in CASES
        for nodes in ("", "1,1")
    ],
)
def test_an_interrupted_construction_reaches_the_other_rank(case: str, nodes: str) -> None:
    script, told = CASES[case]
    result = run_ranks(COMMON + script, 2, "exported", env={"RING_VIRTUAL_NODES": nodes}, timeout=90, check=False)
    waited, interrupted = result.values("outcome")
    assert interrupted == ["TimeIsUp", "on rank 1"], interrupted
    assert waited is not None, result
    assert re.search(told, waited[1], re.DOTALL), waited


@pytest.mark.slow
def test_memory_that_one_rank_cannot_map_is_an_error_on_all() -> None:
    script = """
from ring_plugins.core.base.errors import SharedMemoryError

def reject(address, rank):
    raise SharedMemoryError(f"cannot map the memory of rank {rank}: Permission denied.")

if RANK == 1:
    Segment.open = reject
attempt(ring.init)
"""
    result = run_ranks(COMMON + script, 2, "exported", timeout=90, check=False)
    for kind, text in result.values("outcome"):
        assert kind == "SharedMemoryError", text
        assert re.match("rank 1 on .* cannot map the memory of rank 0: Permission denied", text), text
