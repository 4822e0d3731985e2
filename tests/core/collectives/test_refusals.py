"""A call that one rank refuses reaches the ranks that wait for it; one that all refuse or mistake ends nothing."""

import re

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.executor import SerialExecutor
from ring_plugins.core.collectives.fingerprint import fingerprint
from ring_plugins.core.control.wait import Wait
from tests.launch import run_ranks

SCRIPT = """
import os
import numpy as np
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=2)
rank, failed = ring.rank(), []

def fails(call):
    try:
        call()
    except ring.RingError as error:
        failed.append([type(error).__name__, str(error)])

# Refused by all, or seen by all: the job goes on.
for _ in range(2):
    fails(lambda: ring.all_reduce(np.ones(3, np.int32)))
    assert ring.all_reduce(np.ones(3), ring.SUM).tolist() == [2.0] * 3
if "RING_VIRTUAL_NODES" not in os.environ:
    fails(lambda: ring.barrier() if rank else ring.all_reduce(np.ones(5)))
    assert ring.all_reduce(np.ones(3), ring.SUM).tolist() == [2.0] * 3
report("together", [name for name, _ in failed])
failed.clear()
# Refused by rank 1 alone, which does not end: the other one hears of it and both communicators are broken.
fails(lambda: ring.all_reduce(np.ones(4, np.int32 if rank else np.float32)))
import time
while rank and ring.core.world.current().communicator._executor.failure.error is None:
    time.sleep(0.01)
fails(ring.barrier)
report("alone", failed)
"""


@pytest.mark.parametrize(("launcher", "nodes"), [("spawned", ""), ("torchrun", "1,1")])
def test_a_refusal_reaches_the_rank_that_waits(launcher, nodes):
    result = run_ranks(SCRIPT, 2, launcher, env={"RING_VIRTUAL_NODES": nodes} if nodes else {}, timeout=60)
    together = ["ArgumentError"] * 2 + ["MismatchError"] * (not nodes)
    assert result.values("together") == [together] * 2
    (waited, again), (refused, broken) = result.values("alone")
    told = r"rank 1 refused the arguments of all_reduce: .*op=AVERAGE.* Rank 0 waits for it in ring: all_reduce\(4"
    assert waited[0] == "PeerRefused" and re.match(told, waited[1])
    assert again == waited
    assert refused[0] == "ArgumentError"
    assert broken[0] == "PeerFailed" and "rank 0 gave up all_reduce(4 x float32, average)" in broken[1]


def test_refusals_are_counted_from_the_last_operation():
    told = []

    class Members:
        def refuse(self, *what):
            told.append(what[:3])

    executor = SerialExecutor("test", Wait("test", None), Members())
    for name in ("a", "b"):
        executor.refuse(name, ArgumentError("no"))

    executor.run(fingerprint("barrier"), lambda fingerprint: None)
    executor.refuse("c", ArgumentError("no"))
    assert told == [(0, 0, "a"), (0, 1, "b"), (1, 0, "c")]
