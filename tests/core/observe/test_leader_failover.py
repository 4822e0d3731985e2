"""When rank 0 is lost and the job goes on, the others still hear of rejections, stalls and deadlocks."""

import json
import re
import signal
import time

import pytest

from tests.launch import run_ranks, start_ranks

START = """
import json, os, signal, time
import numpy as np
import ring_plugins as ring
from ring_plugins.core.world import current
from tests.worker import report, report_pid
ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure="continue")
me = ring.rank()
report_pid()
one, other = current().new_communicator("one"), current().new_communicator("other")
for dies in json.loads(os.environ.get("TEST_DIE", "[0]")):
    if me == dies:
        time.sleep(2 * me)  # until it has taken over
        os.kill(os.getpid(), signal.SIGKILL)
    ring.barrier()
"""

MISTAKES = """
def error(call):
    try:
        call()
    except ring.RingError as error:
        return f"{type(error).__name__}: {error}"

if me == 1:
    time.sleep(3)  # asleep here
ring.all_reduce(np.ones(4))
report("rejected", error(lambda: ring.all_reduce(np.ones(3), out=np.ones(3 + (me == 2)))), me)
report("deadlock", error(one.barrier if me == 1 else other.barrier), me)
"""


def test_rejections_stalls_and_deadlocks_are_told_without_rank_0():
    result = run_ranks(START + MISTAKES, 4, env={"RING_STALL_WARNING": "1.5"}, timeout=60)
    rejected, deadlock = result.values("rejected"), result.values("deadlock")
    assert all("rank 2 rejected the arguments of all_reduce: out has 4" in rejected[i] for i in (0, 2)), rejected
    # Whoever hears of it first leaves the job.
    assert any(text.startswith("DeadlockError: rank ") for text in deadlock), deadlock
    said = result.output
    assert re.search(r"missing: rank 1 \(process \d+ on \S+\)", said), said
    assert "time.sleep(3)  # asleep here" in said
    assert "the stall is over" in said


@pytest.mark.slow
@pytest.mark.parametrize("lost", [[0], [0, 1]])
def test_ring_stall_abort_ends_the_job_without_rank_0(lost):
    body = START + "while True:\n    ring.all_reduce(np.ones(10)); time.sleep(0.01)\n"
    env = {"RING_STALL_WARNING": "1", "RING_STALL_ABORT": "4", "TEST_DIE": json.dumps(lost)}
    with start_ranks(body, 4, env=env) as job:
        job.pids()
        time.sleep(3 * len(lost))  # they are gone by then
        job.send_signal(3, signal.SIGSTOP)
        result = job.wait(40)
    assert result.returncode != 0
    assert "the process is stopped" in result.output
    assert re.search(r"rank 3 did not reach .*within RING_STALL_ABORT=4 seconds", result.output)
