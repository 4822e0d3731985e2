"""What the user reads when ranks wait, and that it comes from where the missing rank really is."""

import re
import signal

import pytest

from ring_plugins.core.control.failure_detector import Peer
from ring_plugins.core.observe.stall_report import Absent, Waiting, guess, report, without_those_who_came
from tests.launch import run_ranks, start_ranks

COMMON = """
import os, sys, time
import numpy as np
import ring_plugins as ring
from tests.worker import report, report_pid
ring.init(ranks=int(os.environ["TEST_RANKS"]))
for _ in range(3):
    ring.all_reduce(np.ones(10))
report_pid()
"""

STALLS = """
def validate():
    time.sleep(6)  # asleep here

if ring.rank() == 1:
    validate()
ring.all_reduce(np.ones(1000), ring.SUM)
time.sleep(1)  # or rank 2 could not say that it waits no longer
if ring.rank() == 2:
    sum(range(6 * 10**8))
ring.all_gather(np.ones(7))
"""


def test_a_stall_is_explained_once_and_ends():
    result = run_ranks(COMMON + STALLS, 3, env={"RING_STALL_WARNING": "2"}, timeout=60)
    said = result.output
    first = said[said.index("stalled for") : said.index("Next report")]
    assert re.search(r"ranks 0, 2 wait since \d+:\d+:\d+ in ring: all_reduce\(1000 x float64, sum\), for rank 1", first)
    assert re.search(r"missing: rank 1 \(process \d+ on \S+\)", first)
    assert "last in ring_plugins: ring: all_reduce(10 x float64, average)" in first
    assert re.search(r"script.py, line \d+, in validate: time.sleep\(6\)  # asleep here", first)
    assert "evaluation" in first
    assert "the stall is over" in said
    # The second stall: a rank that cannot answer.
    second = said[said.index("the stall is over") :]
    assert "ranks 0, 1 wait" in second
    assert "does not answer; its process is running" in second
    assert "holding the GIL" in second


def test_a_stopped_process_is_named_and_the_job_can_end_by_itself():
    body = COMMON + "while True:\n    ring.all_reduce(np.ones(10)); time.sleep(0.01)\n"
    with start_ranks(body, 2, env={"RING_STALL_WARNING": "1", "RING_STALL_ABORT": "4"}) as job:
        job.send_signal(1, signal.SIGSTOP)
        result = job.wait(30)
    assert result.returncode != 0
    assert "the process is stopped" in result.output
    assert re.search(r"rank 0 ends because rank 1 did not come to .*within RING_STALL_ABORT=4 seconds", result.output)


# No launcher ends what is left, and without shared memory ranks are as on different hosts.
TWO_PROCESSES = """
import os, socket, subprocess, sys
if "RANK" not in os.environ:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RING_SHARED_MEMORY="0")
    other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1"})
    os.environ["RANK"] = "0"
"""


def test_a_death_on_another_host_is_named():
    body = TWO_PROCESSES + COMMON + "if ring.rank() == 0:\n    time.sleep(60)\nring.barrier()\n"
    with start_ranks(body, 2) as job:
        job.send_signal(1, signal.SIGKILL)
        result = job.wait(30)
    assert result.returncode != 0
    assert re.search(r"rank 0 ends because rank 1 \(process \d+ on \S+\) died without a word", result.output), result


@pytest.mark.mpi
def test_different_operations_on_different_hosts_are_named():
    body = COMMON + "ring.barrier() if ring.rank() else ring.all_reduce(np.ones(10))\n"
    result = run_ranks(body, 2, "mpirun", env={"RING_SHARED_MEMORY": "0"}, timeout=60, check=False)
    assert result.returncode != 0
    # In words that are not in the script, whose lines a traceback shows.
    reduces, meets = r"all_reduce\(10 x float64, average\)", r"ring: barrier\(\)"
    assert re.search(f"{reduces}.* {meets}|{meets}.* ring: {reduces}", result.output), result


# Pure text --------------------------------------------------------------------------------------------

ROSTER = [Peer(f"host{rank // 2}", 100 + rank, f"host{rank // 2}") for rank in range(4)]


def wait(rank, missing, what="ring: barrier()", part_of=""):
    return Waiting(rank, what.split(":", 1)[0], what, 4, part_of, missing, 10.0, 10.0, "12:00:00")


def account(*stack, step=5):
    return {"activities": [], "step": step, "stack": [[file, 1, function, ""] for file, function in stack]}


def test_a_report_names_the_bucket_and_stops_at_the_packages_own_frames():
    stack = [["train.py", 3, "<module>", "step()"], ["/x/ring_plugins/core/waiting.py", 9, "until", "sleep()"]]
    found = Absent(
        {**account(), "stack": [*stack, ["/x/ring_plugins/core/inner.py", 1, "deep", ""]]}, {"state": "S", "said": ""}
    )
    waits = [wait(0, (3,), "gradients: all_reduce(8 x float32, average) between hosts", "bucket 1 of 2 (w … b)")]
    text = report(waits, {3: found}, ROSTER, 5, 50.0, 30.0)
    assert "stalled for 40 s" in text
    assert "in gradients: all_reduce(8 x float32, average), part of bucket 1 of 2 (w … b), for rank 3" in text
    assert "missing: rank 3 (process 103 on host1)" in text
    assert "waiting.py" in text
    assert "inner.py" not in text


def test_who_has_not_come_to_what_gpus_wait_for_is_found_out_from_who_waits():
    def on_gpu(rank, number):
        others = tuple(other for other in range(4) if other != rank)
        what = "gradients: all_reduce on the GPU"
        return Waiting(rank, "gradients", what, number, "bucket 0 of 2 (a)", others, 10.0, 0.0, "12:00:00", on_gpu=True)

    found = without_those_who_came([on_gpu(0, 7), on_gpu(1, 7), on_gpu(3, 6), wait(2, (0, 1, 3))])
    assert [one.missing for one in found] == [(2, 3), (2, 3), (2,), (0, 1, 3)]
    all_came = without_those_who_came([on_gpu(rank, 7) for rank in range(4)])
    text = report(all_came, {}, ROSTER, 5, 50.0, 30.0)
    assert "ranks 0, 1, 2, 3 wait since 12:00:00 in gradients: all_reduce on the GPU, part of bucket 0 of 2 (a)" in text
    assert "to which all have come: NCCL does not get through" in text


def test_many_ranks_are_counted():
    waits = [wait(rank, (0,)) for rank in range(1, 300)]
    membership = [Peer("h", rank, "h") for rank in range(300)]
    text = report(waits, {0: Absent(None, None)}, membership, 0, 50.0, 30.0)
    assert "and 291 more wait since" in text
    assert len(text) < 1000


def test_causes_are_guessed_from_stacks_and_the_kernel():
    kernel = {"state": "S", "said": ""}
    at = lambda *stack, **more: guess(account(("train.py", "main"), *stack, **more), kernel, 5, "")  # noqa: E731
    assert "data loader" in at(("/lib/torch/utils/data/dataloader.py", "_next_data"))
    assert "data loader" in at(("mine.py", "__getitem__"), ("numpy.py", "load"))
    assert "checkpoint" in at(("/lib/torch/serialization.py", "save"))
    assert "checkpoint" in at(("mine.py", "save_checkpoint"), ("shutil.py", "copy"))
    assert "evaluation" in at(("/lib/lightning/pytorch/loops/evaluation_loop.py", "run"), ("model.py", "forward"))
    assert "debugger" in at(("/usr/lib/python3/pdb.py", "interaction"))
    assert "compiles" in at(("/lib/torch/_inductor/compile_fx.py", "compile"))
    assert "has ended" in at(("/usr/lib/threading.py", "_shutdown"))
    assert "2 more steps" in at(("mine.py", "plot"), step=7)
    assert "computes" in at(("mine.py", "plot"))
    assert "another path" in guess(account(("train.py", "main")), kernel, 5, "ring: barrier()")
    assert "stopped" in guess(None, {"state": "T", "said": ""}, 5, "")
    assert "dead" in guess(None, {"state": "", "said": ""}, 5, "")
    assert "cut off" in guess(None, None, 5, "")
