"""Three and four ranks that wait for each other in a circle raise, and a circle that bytes still leave does not."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_plugins.core.observe.deadlock import _circles, _deadlock
from ring_plugins.core.observe.stall_report import Waiting
from tests.launch import Launcher, run_ranks

COMMON = """
import os, time
import torch, torch.distributed as dist
import ring_plugins as ring, ring_plugins.torch as rt
from tests.worker import report
size = int(os.environ["TEST_RANKS"])
ring.init(ranks=size)
dist.init_process_group("ring")
rank, before, after = ring.rank(), (ring.rank() - 1) % size, (ring.rank() + 1) % size
groups = [dist.new_group(sorted((i, (i + 1) % size))) for i in range(size)]  # each rank and the next one

def attempt(call):
    try:
        call()
        return "done"
    except ring.RingError as error:
        return [type(error).__name__, str(error)]
"""

# Every rank waits for the next one: for a message, then in a collective.
CIRCLE = """
def collective():
    dist.all_reduce(torch.ones(3), group=groups[rank])

def message():
    dist.recv(torch.ones(3), after)

report("message", attempt(message))
report("outcome", attempt(collective))
"""


@pytest.mark.parametrize(
    ("launcher", "size", "nodes"),
    [
        ("spawned", 3, ""),
        pytest.param("torchrun", 3, "1,1,1", marks=pytest.mark.slow),
        pytest.param("spawned", 4, "", marks=pytest.mark.slow),
        pytest.param("torchrun", 4, "2,2", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_wait_in_a_circle_raise(launcher: Launcher, size: int, nodes: str) -> None:
    env = {"RING_VIRTUAL_NODES": nodes} if nodes else {}
    result = run_ranks(COMMON + CIRCLE + LINGER, size, launcher, env=env, timeout=90, check=False)
    for circle in ("message", "outcome"):
        assert len(result.values(circle)) == size, result
        for rank, (kind, text) in enumerate(result.values(circle)):
            assert kind == "DeadlockError", (circle, rank, kind, text)
            for waiting in range(size):
                assert re.search(f"rank {waiting} waits for rank {(waiting + 1) % size} in ", text), text


# The others must have raised before a rank leaves.
LINGER = """
import pathlib
done = pathlib.Path(os.environ["TEST_REPORTS"])
while sum("outcome" in file.read_text() for file in done.iterdir()) < size:
    time.sleep(0.05)
"""

# Ranks 0, 1, 2 and ranks 0, 1, 3 wait in circles: both go from rank 0 to rank 1. A rank that has raised ends.
SHARED = """
group = dist.new_group([1, 2, 3])
if rank == 0:
    report("outcome", attempt(lambda: dist.recv(torch.ones(3), 1)))
elif rank == 1:
    report("outcome", attempt(lambda: dist.all_reduce(torch.ones(3), group=group)))
else:
    report("outcome", attempt(lambda: dist.recv(torch.ones(3), 0)))
"""


@pytest.mark.slow
def test_ranks_of_circles_that_share_ranks_raise() -> None:
    result = run_ranks(COMMON + SHARED, 4, timeout=90, check=False)
    kinds = [kind for kind, _ in result.values("outcome")]
    assert len(kinds) == 4, result
    assert "DeadlockError" in kinds, result  # those that the others see leave before they are told get PeerLeft
    assert set(kinds) <= {"DeadlockError", "PeerLeft", "PeerFailed"}, result


# Rank 0 begins what the last rank waits in, in the background, after everybody has waited for some seconds.
SLOW = """
work = None
if rank == 0:
    # Behind something that takes its time; Python's object is the group itself.
    groups[-1]._communicator.start("slow", lambda: time.sleep(6))
    work = dist.all_reduce(torch.ones(3), group=groups[-1], async_op=True)
if rank:
    dist.all_reduce(torch.ones(3), group=groups[rank])
    dist.all_reduce(torch.ones(3), group=groups[before])
else:
    dist.all_reduce(torch.ones(3), group=groups[0])
    work.wait()
report("outcome", "done")
"""


@pytest.mark.slow
def test_a_circle_in_which_one_rank_has_queued_its_part_is_no_deadlock() -> None:
    assert run_ranks(COMMON + SLOW, 3, timeout=90).values("outcome") == ["done"] * 3


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ({0: [1], 1: [2], 2: [0]}, [[0, 1, 2]]),
        ({0: [1], 1: [0]}, []),
        ({0: [1], 1: [0, 2], 2: [0]}, [[0, 1, 2]]),
        ({5: [0], 0: [1], 1: [2], 2: [3], 3: [0]}, [[0, 1, 2, 3]]),
        ({0: [9], 1: [0], 2: [1]}, []),
        ({0: [1], 1: [2], 2: [0], 3: [4], 4: [5], 5: [3]}, [[0, 1, 2], [3, 4, 5]]),
        ({0: [1, 2], 1: [0], 2: [1]}, [[0, 2, 1]]),  # past a pair in which one rank has nobody else to wait for
        ({0: [1, 3], 1: [2], 2: [0], 3: [4], 4: [0]}, [[0, 1, 2]]),  # and [0, 3, 4], which shares a rank
        ({0: [1, 2], 1: [0, 2], 2: [0, 1]}, [[0, 2, 1]]),
        ({0: [1], 1: [0, 2], 2: [1, 3], 3: [2]}, []),
        ({}, []),
    ],
)
def test_circles_of_three_and_more(missing: dict[int, list[int]], found: list[list[int]]) -> None:
    assert _circles(missing) == found


@pytest.mark.parametrize(
    ("communicator", "cause"),
    [
        (
            "local updates",
            "Ranks may take different numbers of steps between exchanges, but all take part in the last one",
        ),
        ("gradients", "different numbers of steps, or a condition"),
    ],
)
def test_a_deadlock_of_an_exchange_does_not_blame_numbers_of_steps(communicator: str, cause: str) -> None:
    waits = [
        Waiting(0, communicator, "exchange", 1, "", (1,), 0, 0, ""),
        Waiting(1, "ring", "barrier", 2, "", (0,), 0, 0, ""),
    ]
    assert cause in _deadlock(1, waits)["text"]


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.integers(0, 6), st.lists(st.integers(0, 6), max_size=3), max_size=7))
def test_circles_are_circles_and_one_is_found_if_there_is_any(missing: dict[int, list[int]]) -> None:
    missing = {rank: [other for other in others if other != rank] for rank, others in missing.items()}
    found = _circles(missing)
    ranks = [rank for circle in found for rank in circle]
    assert len(ranks) == len(set(ranks))
    for circle in found:
        assert len(circle) > 2
        for rank, after in zip(circle, [*circle[1:], circle[0]], strict=True):
            assert after in missing[rank]
    exists = any(
        all(after in missing[rank] for rank, after in zip(ordered, [*ordered[1:], ordered[0]], strict=True))
        for length in range(3, len(missing) + 1)
        for ordered in itertools.permutations(missing, length)
    )
    assert exists == bool(found)
