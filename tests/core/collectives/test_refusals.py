"""A call that one rank rejects reaches the ranks that wait for it; one that all reject or mistake ends nothing."""

import re

import pytest

from ring_plugins.core.base.errors import ArgumentError, MismatchError
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

# Rejected by all, or seen by all: the job goes on.
for _ in range(2):
    fails(lambda: ring.all_reduce(np.ones(3, np.int32)))
    fails(lambda: ring.all_reduce(np.ones(3), "sum"))
    assert ring.all_reduce(np.ones(3), ring.SUM).tolist() == [2.0] * 3
if "RING_VIRTUAL_NODES" not in os.environ:
    fails(lambda: ring.barrier() if rank else ring.all_reduce(np.ones(5)))
    turned = np.ones((2, 3) if rank else (3, 2))  # as many elements, in another shape
    fails(lambda: ring.all_reduce(turned))
    fails(lambda: ring.all_reduce(turned, out=turned))
    fails(lambda: ring.broadcast(turned))
    fails(lambda: ring.reduce_scatter(np.ones((4, 3) if rank else (6, 2))))
    assert ring.all_reduce(np.ones(3), ring.SUM).tolist() == [2.0] * 3
report("together", [name for name, _ in failed])
failed.clear()
# Rejected by rank 1 alone, which does not end: the other one hears of it and both communicators are broken.
fails(lambda: ring.all_reduce(np.ones(4, np.int32 if rank else np.float32)))
import time
while rank and ring.core.world.current().communicator._executor.failure.error is None:
    time.sleep(0.01)
fails(ring.barrier)
report("alone", failed)
"""


@pytest.mark.parametrize(("launcher", "nodes"), [("spawned", ""), ("exported", "1,1")])
def test_a_rejection_reaches_the_rank_that_waits(launcher, nodes):
    result = run_ranks(SCRIPT, 2, launcher, env={"RING_VIRTUAL_NODES": nodes} if nodes else {}, timeout=60)
    together = ["ArgumentError"] * 4 + ["MismatchError"] * (0 if nodes else 5)
    assert result.values("together") == [together] * 2
    (waited, again), (rejected, broken) = result.values("alone")
    told = r"rank 1 rejected the arguments of all_reduce: .*op=AVERAGE.* Rank 0 waits for it in ring: all_reduce\(4"
    assert waited[0] == "PeerRejected" and re.match(told, waited[1])
    assert again == waited
    assert rejected[0] == "ArgumentError"
    assert broken[0] == "PeerFailed" and "rank 0 gave up all_reduce(4 x float32, average)" in broken[1]


def test_rejections_are_counted_from_the_last_operation():
    told = []

    class Members:
        def reject(self, *what):
            told.append(what[:3])

    executor = SerialExecutor("test", Wait("test", None), Members())
    for name in ("a", "b"):
        executor.reject(name, ArgumentError("no"))

    executor.run(fingerprint("barrier"), lambda fingerprint: None)
    executor.reject("c", ArgumentError("no"))
    assert told == [(0, 0, "a"), (0, 1, "b"), (1, 0, "c")]


AGAIN = """
import time
import numpy as np
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=2)
rank, outcomes = ring.rank(), []
if rank:
    try:
        ring.all_reduce(np.ones(4, np.int32))
    except ring.ArgumentError:
        pass
elif WAITS_FOR_THE_CALL:  # so that this rank arrives last, and need not look for rejections
    own = ring.core.world.current().communicator.groups.node.barriers
    while max(page[0] for page in own._others) <= own._own[0]:
        time.sleep(0.001)
for _ in range(2):
    try:
        ring.all_reduce(np.ones(4, np.float32))
        outcomes.append("done")
    except (ring.MismatchError, ring.PeerFailed) as error:
        outcomes.append(str(error))
report("outcomes", outcomes)
"""


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_calls_again_after_its_own_rejection_is_never_matched(waits):
    result = run_ranks(AGAIN.replace("WAITS_FOR_THE_CALL", str(waits)), 2, timeout=60)
    for outcomes in result.values("outcomes"):
        assert "done" not in outcomes, outcomes
    if waits:
        told = result.values("outcomes")[0][0]
        assert "but rank 1 calls all_reduce(4 x float32, average) after 1 rejected call at " in told


LACKS_MEMORY = """
import resource
import numpy as np
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=2)
rank, outcome = ring.rank(), []

def limit_memory():
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), resource.RLIM_INFINITY))

x = np.ones(1 << 25, np.uint8)
# Threads and staging buffers. The results are held, so that the next call has to find memory of its own.
held = [ring.all_gather(x), ring.all_gather(x, wait=False).wait()]
ring.barrier()
if rank == 1:
    limit_memory()
try:
    CALL
except Exception as error:
    outcome = [type(error).__name__, str(error)]
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
report("outcome", outcome)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "nodes"), [("spawned", ""), ("exported", "1,1")])
@pytest.mark.parametrize("call", ["all_gather(x)", "reduce_scatter(x, ring.SUM)", "all_gather(x, wait=False).wait()"])
def test_a_rank_without_memory_for_the_result_tells_the_others(launcher, nodes, call):
    env = {"RING_VIRTUAL_NODES": nodes} if nodes else {}
    result = run_ranks(LACKS_MEMORY.replace("CALL", f"ring.{call}"), 2, launcher, env=env, timeout=60)
    waited, lacked = result.values("outcome")
    assert lacked[0].endswith("MemoryError"), lacked
    assert waited[0] in ("PeerRejected", "PeerFailed") and re.match(".*rank 1.*Memory", waited[1]), (
        waited,
        lacked,
    )


HALFWAY = """
import ring_plugins as ring, ring_plugins.core.functions as functions, numpy as np
from tests.worker import report
ring.init(ranks=2)

def interrupt(*shape):
    raise KeyboardInterrupt

outcomes = []
if ring.rank() == 1:
    functions._empty = interrupt
for call in (lambda: ring.all_gather(np.ones(3)), ring.barrier):
    try:
        call()
    except (KeyboardInterrupt, ring.RingError) as error:
        outcomes.append([type(error).__name__, str(error)])
report("outcomes", outcomes)
"""


def test_an_interruption_between_the_halves_of_a_collective_breaks_it_on_all_ranks():
    (waited, again), (interrupted, broken) = run_ranks(HALFWAY, 2, timeout=60).values("outcomes")
    assert waited[0] == again[0] == "PeerFailed"
    assert "rank 1 was interrupted in all_gather by KeyboardInterrupt" in waited[1]
    assert interrupted[0] == "KeyboardInterrupt" and broken[0] == "RingError"


def test_a_rejection_that_passes_through_several_layers_counts_once():
    told = []

    class Members:
        def reject(self, *what):
            told.append(what[:3])

    executor, error = SerialExecutor("test", Wait("test", None), Members()), ValueError("no")

    def raise_error(fingerprint):
        raise error

    with pytest.raises(ValueError, match="no"):
        executor.run(fingerprint("barrier"), raise_error)
    executor.reject("the caller", error)
    work = executor.start("in the background", lambda: executor.run(fingerprint("all_reduce"), raise_error))
    with pytest.raises(ValueError, match="no"):
        work.wait()
    executor.close()
    assert told == [(0, 0, "barrier()")]


def test_only_errors_of_the_call_itself_are_rejections():
    told = []

    class Members:
        def reject(self, *what):
            told.append(type(what[-1]))

    executor = SerialExecutor("test", Wait("test", None), Members())
    for error in (MismatchError("all raise it"), TimeoutError(), KeyboardInterrupt(), MemoryError(), TypeError()):
        executor.reject("x", error)
    assert told == [MemoryError, TypeError]
