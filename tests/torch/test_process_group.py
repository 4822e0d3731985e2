"""The "ring" backend of torch.distributed: the checks of checks_process_group.py under several kinds of launch."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.launch import Launcher, Result, run_ranks, shared
from tests.torch.checks_process_group import CHECKS, is_done


class Launch(NamedTuple):
    launcher: Launcher
    ranks: int
    nodes: str = ""
    slow: bool = False

    def __str__(self) -> str:
        return f"{self.launcher}-{self.ranks}-{self.nodes}"


LAUNCHES = [
    Launch("spawned", 1),
    Launch("spawned", 2),
    Launch("mpirun", 3, nodes="2", slow=True),
    Launch("spawned", 4, slow=True),
    Launch("torchrun", 2, nodes="2", slow=True),
]


def parameters(launch: Launch, *more: str) -> Any:
    marks = [pytest.mark.mpi] * (launch.launcher == "mpirun") + [pytest.mark.slow] * launch.slow
    return pytest.param(launch, *more, marks=marks, id="-".join([str(launch), *more]))


@shared
def launched(launch: Launch) -> Result:
    env = {"RING_VIRTUAL_NODES": launch.nodes}
    if launch.launcher == "spawned":
        env["TEST_SPAWN"] = "1"
    script = Path(__file__).with_name("checks_process_group.py")
    return run_ranks(script, launch.ranks, launch.launcher, env=env, timeout=90, check=False)


@pytest.mark.parametrize(
    ("launch", "check"),
    [
        parameters(launch, check.__name__)
        for launch in LAUNCHES
        for check in CHECKS
        if is_done(check, launch.ranks, bool(launch.nodes), on_gpu=False)
    ],
)
def test_check(launch: Launch, check: str) -> None:
    result = launched(launch)
    for rank in range(launch.ranks):
        outcome = result.reports.get(rank, {}).get(check, "was not reached")
        assert outcome == "ok", f"rank {rank}: {outcome}\n{result if outcome == 'was not reached' else ''}"


@pytest.mark.parametrize("launch", [parameters(launch) for launch in LAUNCHES])
def test_every_launch_ends_well(launch: Launch) -> None:
    result = launched(launch)
    assert result.returncode == 0, result
    assert len(result.reports) == launch.ranks


FAILING = """
import torch, torch.distributed as dist
import ring_plugins as ring, ring_plugins.torch

ring.init(ranks=2)
dist.init_process_group("ring")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
for step in range(5):
    if step == 3 and dist.get_rank() == 1:
        raise ValueError("a bad batch")
    model(torch.ones(2, 3)).sum().backward()
"""


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_inside_backward() -> None:
    result = run_ranks(FAILING, 2, timeout=30, check=False)
    assert result.returncode != 0
    assert "ValueError: a bad batch" in result.stderr
    assert "rank 1 failed: ValueError: a bad batch" in result.stderr  # so rank 0 learned of it


MESSAGES = """
import os, signal, time
import torch, torch.distributed as dist
import ring_plugins as ring, ring_plugins.torch
from tests.worker import report

ring.init()
dist.init_process_group("ring")
rank, large = dist.get_rank(), torch.ones(1_000_000)

def outcome(call):
    try:
        call()
    except ring.RingError as error:
        return [type(error).__name__, str(error)]

if os.environ["TEST_CONNECTED"]:
    (dist.send if rank else dist.recv)(large, 1 - rank)
else:
    group = dist.new_group([0, 1])  # in the same one, a rank that has got the error would receive what the other sends
    report("both send first", outcome(lambda: dist.send(large, 1 - rank, group=group)))
if rank == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
report("killed", outcome(lambda: dist.recv(large, 1)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["", "1,1"])
@pytest.mark.parametrize("connected", ["", "1"])
def test_a_deadlock_of_messages_and_a_killed_peer_are_errors_that_name_the_rank(nodes: str, connected: str) -> None:
    env = {"RING_VIRTUAL_NODES": nodes, "TEST_CONNECTED": connected}
    result = run_ranks(MESSAGES, 2, "torchrun", env=env, timeout=90, check=False)
    assert len(result.values("both send first")) == (0 if connected else 2), result
    for rank, (kind, text) in enumerate(result.values("both send first")):
        other = 1 - rank
        assert kind == "DeadlockError", result
        assert f"rank {rank} waits for rank {other} in process group" in text
        assert f"while rank {other} waits for rank {rank} in process group" in text
    ((kind, text),) = result.values("killed")
    assert kind == "PeerFailed" and "rank 1 " in text and "killed by a signal" in text, result
