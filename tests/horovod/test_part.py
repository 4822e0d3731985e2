"""`hvd.init(comm=)` with some of the launcher's ranks makes a job of them."""

import pytest

from tests.launch import run_ranks

SCRIPT = """
import os

import torch

import ring_plugins as ring
import ring_plugins.horovod.torch as hvd
from tests.worker import report

launched = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
if os.environ.get("OMPI_COMM_WORLD_RANK"):
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(launched == 1, -launched)
else:
    part = [1] if launched == 1 else [2, 0]
if os.environ["TEST_FAULT"]:
    part = {"other": [0, 1] if launched < 2 else [0, 2], "outside": [0, 1]}[os.environ["TEST_FAULT"]]
try:
    hvd.init(comm=part)
except ring.RingError as error:
    report("refused", str(error), launched)
    raise
hvd.init(comm=part)
report("place", [hvd.rank(), hvd.size(), hvd.local_rank(), int(os.environ["HOROVOD_SIZE"])], launched)
value = torch.tensor([float(launched)])
found = hvd.allreduce(value, op=hvd.Sum, name="x"), hvd.broadcast(value, 0), hvd.allgather(value)
report("values", [one.tolist() for one in found], launched)
try:
    hvd.init(comm=[0])
    report("again", "", launched)
except ring.ArgumentError as error:
    report("again", str(error), launched)
hvd.shutdown()
hvd.init()
report("all", [hvd.rank(), hvd.size()], launched)
"""


def launch(launcher, fault="", **options):
    return run_ranks(SCRIPT, 3, launcher, env={"TEST_FAULT": fault}, timeout=120, **options)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_ranks_of_a_part_are_numbered_among_themselves(launcher):
    result = launch(launcher)
    assert result.values("place") == [[1, 2, 1, 2], [0, 1, 0, 1], [0, 2, 0, 2]]
    assert result.values("values") == [[[2], [2], [2, 0]], [[1], [1], [1]], [[2], [2], [2, 0]]]
    assert all("has joined a job of" in text for text in result.values("again"))
    assert result.values("all") == [[0, 3], [1, 3], [2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [("other", "comm=[[0, 1], [0, 1], [0, 2]]"), ("outside", "ranks [0, 1] of a job of 3, and rank 2 called")],
)
def test_parts_that_do_not_fit_are_refused_on_all_ranks(fault, text):
    result = launch("exported", fault, check=False)
    assert result.returncode and len(result.values("refused")) == 3
    assert all(text in one for one in result.values("refused"))
