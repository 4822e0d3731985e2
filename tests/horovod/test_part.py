"""`hvd.init(comm=)` with some of the launcher's ranks makes a job of them."""

import re
import sys

import pytest

from tests.launch import run_ranks, start_ranks

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


#: Ends nobody, unlike other launchers.
STARTS = """
import os, socket, subprocess, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    port = str(server.getsockname()[1])
shared = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
envs = [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(3)]
started = [subprocess.Popen([sys.executable, *sys.argv[1:]], env=env) for env in envs]
sys.exit(max([process.wait() != 0 for process in started]))
"""
FAILS = """
import os, signal, time
from pathlib import Path

import torch

import ring_plugins as ring
import ring_plugins.horovod.torch as hvd
from tests.worker import report

launched = int(os.environ["RANK"])
hvd.init(comm=[1] if launched == 1 else [2, 0])
report("place", hvd.rank(), launched)
while len(list(Path(os.environ["TEST_REPORTS"]).iterdir())) < 3:
    time.sleep(0.01)
victim, how = os.environ["TEST_FAULT"].split()
try:
    for step in range(10**9):
        if launched == int(victim) and step == 5:
            if how == "raises":
                raise ValueError("no more")
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1), name="x")
except ring.RingError as error:
    report("error", str(error), launched)
    raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "dies"])
@pytest.mark.parametrize("victim", [1, 2])
def test_all_parts_hear_of_a_rank_that_fails_by_the_number_that_the_launcher_gave_it(victim, how):
    launcher = [sys.executable, "-c", STARTS]
    with start_ranks(FAILS, 3, launcher, env={"TEST_FAULT": f"{victim} {how}"}) as job:
        result = job.wait(60)
    said = f"rank {victim} failed: ValueError: no more" if how == "raises" else rf"rank {victim} \(process \d+\) died"
    assert result.returncode
    for rank in {0, 1, 2} - {victim}:
        heard = result.reports[rank].get("error")  # none if it never waited for long, and its monitor has ended it
        assert heard is None or re.match(said, heard), str(result)
        assert re.search(rf"rank {rank} ends because {said}", result.output), str(result)
