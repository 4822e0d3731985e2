"""Stalls and deadlocks: in real jobs, and as messages between rank 0 and the other ranks."""

import re
import signal
import time
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control.wait import LongWait, Wait, long_waits
from ring_plugins.core.observe.stall import StallAggregator, StallWatch
from tests.core.observe.fakes import FakeChannel
from tests.launch import run_ranks, start_ranks

COMMON = """
import ctypes, os, sys, time
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
    time.sleep(5)  # asleep here

if ring.rank() == 1:
    validate()
ring.all_reduce(np.ones(1000), ring.SUM)
time.sleep(1)  # or rank 2 could not report the end of its wait
if ring.rank() == 2:
    ctypes.PyDLL(None).sleep(6)  # in C, and holds the GIL
ring.all_gather(np.ones(7))
"""


def test_a_stall_is_explained_once_and_ends():
    result = run_ranks(COMMON + STALLS, 3, env={"RING_STALL_WARNING": "2"}, timeout=60)
    said = result.output
    first = said[said.index("stalled for") : said.index("Next report")]
    # One of the two may not have waited quite long enough yet when the other's wait is reported.
    waiting = r"ranks? (0|2|0, 2) ha(s|ve) been waiting since \d+:\d+:\d+"
    assert re.search(waiting + r" in ring: all_reduce\(1000 x float64, sum\), for rank 1", first)
    assert re.search(r"missing: rank 1 \(process \d+ on \S+\)", first)
    assert "last operation: ring: all_reduce(10 x float64, average)" in first
    assert re.search(r"script.py, line \d+, in validate: time.sleep\(5\)  # asleep here", first)
    assert "it is evaluating while the others train" in first
    assert "the stall is over" in said
    # The second stall: a rank that cannot answer.
    second = said[said.index("the stall is over") :]
    assert "ranks 0, 1 have been waiting" in second
    assert "does not answer; its process is sleeping" in second
    assert "holds the GIL" in second


def test_a_stopped_process_is_named_and_ring_stall_abort_ends_the_job():
    body = COMMON + "while True:\n    ring.all_reduce(np.ones(10)); time.sleep(0.01)\n"
    with start_ranks(body, 2, env={"RING_STALL_WARNING": "1", "RING_STALL_ABORT": "4"}) as job:
        job.send_signal(1, signal.SIGSTOP)
        result = job.wait(30)
    assert result.returncode != 0
    assert "the process is stopped" in result.output
    assert re.search(r"rank 0 ends because rank 1 did not reach .*within RING_STALL_ABORT=4 seconds", result.output)


# No launcher ends the other process, and without shared memory the ranks behave as on different hosts.
TWO_PROCESSES = """
import os, socket, subprocess, sys
if "RANK" not in os.environ:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RING_SHARED_MEMORY="0")
    other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1"})
    os.environ["RANK"] = "0"
"""


@pytest.mark.slow
def test_a_death_on_another_host_is_named():
    body = TWO_PROCESSES + COMMON + "if ring.rank() == 0:\n    time.sleep(60)\nring.barrier()\n"
    with start_ranks(body, 2) as job:
        job.send_signal(1, signal.SIGKILL)
        result = job.wait(30)
    assert result.returncode != 0
    assert re.search(
        r"rank 0 ends because rank 1 \(process \d+ on \S+\) died without reporting an error", result.output
    ), result


@pytest.mark.mpi
def test_different_operations_on_different_hosts_are_named():
    body = COMMON + "ring.barrier() if ring.rank() else ring.all_reduce(np.ones(10))\n"
    result = run_ranks(body, 2, "mpirun", env={"RING_SHARED_MEMORY": "0"}, timeout=60, check=False)
    assert result.returncode != 0
    calls = "rank 0 calls all_reduce(10 x float64, average), but rank 1 calls barrier(). "
    assert f"MismatchError: ranks disagree in ring: {calls}" in result.output, result


# Rank 0 first begins its part of "weights" after four seconds, in the background. Then both wait in vain.
CROSSED = """
from ring_plugins.core.world import current
one, other = (current().new_communicator("weights") for _ in range(2))
rank = ring.rank()
work = one.start("weights", lambda: (time.sleep(0 if rank else 4), one.barrier()))
if rank == 0:
    ring.barrier(); work.wait()
else:
    work.wait(); ring.barrier()
report("slow", "done")
started = time.monotonic()
try:
    one.barrier() if rank == 0 else other.barrier()
except ring.DeadlockError as error:
    report("deadlock", str(error))
    time.sleep(3)  # or the other rank may hear that this one has left, first
"""


@pytest.mark.slow
def test_a_slow_operation_is_no_deadlock_and_two_communicators_of_one_name_can_have_one():
    result = run_ranks(COMMON + CROSSED, 2, timeout=60)
    assert result.values("slow") == ["done"] * 2
    for rank, text in enumerate(result.values("deadlock")):
        waits = r"rank {} waits for rank {} in weights: barrier\(\) in weights #\d+"
        assert re.match(f"{waits.format(rank, 1 - rank)}, while {waits.format(1 - rank, rank)}. The ranks took", text)
    assert len(result.values("deadlock")) == 2


# In process -------------------------------------------------------------------------------------------

MEMBERS = Members(0, [Member(rank, rank, "a", 100 + rank, "a") for rank in range(3)])


def aggregator(warning=30.0, abort=0.0, members=MEMBERS):
    channel, said = FakeChannel(size=3), []
    return channel, StallAggregator(channel, members, warning, abort, said.append), said


def report_wait(channel, rank, missing, what, communicator="ring", seconds=5.0, number=0, operation_number=3, why=""):
    wait = {
        "communicator": communicator,
        "what": what,
        "number": operation_number,
        "part_of": "",
        "missing": missing,
        "since": seconds,
        "blocked_since": seconds,
        "clock": "12:00:00",
        "on_gpu": False,
        "step": 12,
        "hindrances": why,
    }
    channel.receive(rank, "report_wait", {"number": number, "wait": wait})


def crossed_waits(channel):
    report_wait(channel, 1, [2], "a: barrier()", "a", number=4)
    report_wait(channel, 2, [1], "b: barrier()", "b", number=5)


def test_a_deadlock_is_declared_once_the_other_rank_confirms_its_wait():
    channel, stalls, _ = aggregator()
    crossed_waits(channel)
    stalls.tick(time.monotonic())
    (one, other) = channel.take()
    assert (one[:2], other[:2]) == ((2, "confirm_wait"), (1, "confirm_wait"))
    assert one[2]["number"] == 5
    channel.receive(2, "answer_wait", {"waits": True, "deadlock": one[2]["deadlock"]})
    ((rank, kind, deadlock),) = channel.take()
    assert (rank, kind, deadlock["number"]) == (1, "declare_deadlock", 4)
    assert "rank 1 waits for rank 2 in a: barrier(), while rank 2 waits for rank 1 in b: barrier()" in deadlock["text"]


def test_a_deadlock_tells_what_keeps_a_rank_from_what_others_wait_in():
    channel, stalls, _ = aggregator()
    report_wait(channel, 1, [2], "a: barrier()", "a")
    report_wait(channel, 2, [1], "b: barrier()", "b", why="a backward raised.")
    stalls.tick(time.monotonic())
    for _, _, body in channel.take():
        assert body["deadlock"]["text"].endswith(". On rank 2, a backward raised.")


def test_a_wait_that_has_just_ended_is_no_deadlock():
    channel, stalls, _ = aggregator()
    crossed_waits(channel)
    stalls.tick(time.monotonic())
    question = channel.take()[0][2]
    channel.receive(2, "answer_wait", {"waits": False, "deadlock": question["deadlock"]})
    assert channel.take() == []


def test_one_operation_with_two_stages_is_no_deadlock():
    channel, stalls, _ = aggregator()
    report_wait(channel, 1, [2], "ring: barrier()")
    report_wait(channel, 2, [1], "ring: barrier() between hosts")
    stalls.tick(time.monotonic())
    assert channel.take() == []


def test_different_operations_of_one_number_are_asked_about_at_once():
    channel, stalls, _ = aggregator()
    report_wait(channel, 1, [2], "ring: barrier()", seconds=0.1)
    report_wait(channel, 2, [1], "ring: all_reduce(3 x int8, sum)", seconds=0.1)
    stalls.tick(time.monotonic())
    assert [message[:2] for message in channel.take()] == [(2, "confirm_wait"), (1, "confirm_wait")]


def test_a_rank_that_has_finished_what_the_other_waits_in_is_not_waited_for_in_vain():
    channel, stalls, _ = aggregator()
    report_wait(channel, 1, [2], "ring: barrier()", seconds=20, operation_number=4)
    report_wait(channel, 2, [1], "ring: all_reduce(3 x int8, sum)", seconds=20)  # its bytes are on their way
    stalls.tick(time.monotonic())
    assert channel.take() == []


def test_ranks_are_asked_again_after_a_while():
    channel, stalls, _ = aggregator()
    crossed_waits(channel)
    now = time.monotonic()
    stalls.tick(now)
    for rank, _, question in channel.take():
        channel.receive(rank, "answer_wait", {"waits": False, "deadlock": question["deadlock"]})
    stalls.tick(now + 1.0)
    assert channel.take() == []
    stalls.tick(now + 10.0)
    assert [message[:2] for message in channel.take()] == [(2, "confirm_wait"), (1, "confirm_wait")]


def circle_of_waits(channel, seconds=10):
    for rank, other in ((0, 1), (1, 2), (2, 0)):
        report_wait(channel, rank, [other], f"{rank}: barrier()", str(rank), number=rank + 4, seconds=seconds)


def test_a_circle_of_waits_is_a_deadlock_once_all_of_its_ranks_confirm():
    channel, stalls, _ = aggregator()
    circle_of_waits(channel)
    stalls.tick(time.monotonic())
    questions = channel.take()
    assert [(rank, kind, body["number"]) for rank, kind, body in questions] == [
        (1, "confirm_wait", 5),
        (2, "confirm_wait", 6),
        (0, "confirm_wait", 4),
    ]
    for rank, _, question in questions:
        before = (rank - 1) % 3  # what that rank waits in must not have begun on this one
        assert tuple(question["deadlock"]["needs"]) == (str(before), 3, before)
        assert channel.take() == []
        channel.receive(rank, "answer_wait", {"waits": True, "deadlock": question["deadlock"]})
    told = channel.take()
    assert [(rank, kind, body["number"]) for rank, kind, body in told] == [
        (rank, "declare_deadlock", rank + 4) for rank in range(3)
    ]
    assert told[1][2]["text"].startswith(
        "rank 1 waits for rank 2 in 1: barrier(), rank 2 waits for rank 0 in 2: barrier(), while rank 0 waits for rank "
        "1 in 0: barrier(). The ranks took"
    )
    assert tuple(told[1][2]["awaited"]) == ("0", 3, 0)


def test_a_circle_is_no_deadlock_if_one_rank_has_begun_what_the_one_before_it_waits_in():
    channel, stalls, _ = aggregator()
    circle_of_waits(channel)
    now = time.monotonic()
    stalls.tick(now)
    for rank, _, question in channel.take():
        channel.receive(rank, "answer_wait", {"waits": rank != 1, "deadlock": question["deadlock"]})
    assert channel.take() == []
    stalls.tick(now + 1.0)
    assert channel.take() == []
    stalls.tick(now + 10.0)
    assert [message[:2] for message in channel.take()] == [(rank, "confirm_wait") for rank in (1, 2, 0)]


def test_a_circle_that_shares_a_rank_is_asked_about_once_the_other_is_over():
    channel, stalls, _ = aggregator(members=Members(0, [Member(rank, rank, "a", 100 + rank, "a") for rank in range(5)]))
    circle_of_waits(channel)
    report_wait(channel, 0, [1, 3], "0: barrier()", "0", number=4, seconds=10)
    for rank, other in ((3, 4), (4, 0)):
        report_wait(channel, rank, [other], f"{rank}: barrier()", str(rank), number=rank + 4, seconds=10)
    stalls.tick(time.monotonic())
    first = channel.take()
    assert [(rank, kind) for rank, kind, _ in first] == [(rank, "confirm_wait") for rank in (1, 2, 0)]
    for rank, _, question in first:
        channel.receive(rank, "answer_wait", {"waits": True, "deadlock": question["deadlock"]})
    for rank in range(3):
        channel.receive(rank, "end_wait", {"number": rank + 4})
    channel.take()
    report_wait(channel, 0, [3], "again: barrier()", "again", number=9, seconds=10)  # its script caught the error
    stalls.tick(time.monotonic())
    assert [(rank, kind) for rank, kind, _ in channel.take()] == [(rank, "confirm_wait") for rank in (3, 4, 0)]


def test_a_rank_that_waits_in_two_threads_is_in_no_circle():
    channel, stalls, _ = aggregator()
    circle_of_waits(channel)
    report_wait(channel, 1, [7], "other: barrier()", "other", number=9)
    stalls.tick(time.monotonic())
    assert channel.take() == []


def test_a_circle_that_has_just_closed_is_not_asked_about():
    channel, stalls, _ = aggregator()
    circle_of_waits(channel, seconds=1)
    stalls.tick(time.monotonic())
    assert channel.take() == []


def test_a_missing_rank_is_asked_and_looked_at_by_its_neighbors():
    channel, stalls, said = aggregator(warning=1.0)
    report_wait(channel, 0, [1], "ring: barrier()")
    now = time.monotonic()
    stalls.tick(now)
    assert [message[:2] for message in channel.take()] == [
        (1, "request_snapshot"),
        (0, "request_process_state"),
        (2, "request_process_state"),
    ]
    channel.receive(2, "report_process_state", {"inquiry": 1, "rank": 1, "state": "T", "text": "stopped"})
    stalls.tick(now)
    assert said == []  # rank 1 may still answer
    stalls.tick(now + 2.5)
    assert "its process is stopped" in said[0]
    channel.receive(0, "end_wait", {"number": 0})
    stalls.tick(now + 3.0)
    assert "the stall is over" in said[1]


def test_a_missing_ranks_steps_are_compared_with_those_of_the_ranks_that_wait():
    channel, stalls, said = aggregator(warning=1.0)
    report_wait(channel, 1, [0], "ring: barrier()")  # after 12 steps; rank 0, which reports, has taken more
    stalls.tick(time.monotonic())
    snapshot = {"activities": [], "stack": [["script.py", 7, "main", "work()"]], "step": 15}
    channel.receive(0, "report_snapshot", {"inquiry": 1, **snapshot})
    stalls.tick(time.monotonic())
    assert "it has finished 3 more steps than the waiting ranks" in said[0]


def test_ranks_that_wait_for_each_other_in_a_circle_are_named():
    channel, stalls, said = aggregator(warning=1.0)
    for rank, other in ((0, 1), (1, 2), (2, 0)):
        report_wait(channel, rank, [other], f"{rank}: barrier()", str(rank))
    now = time.monotonic()
    stalls.tick(now)
    stalls.tick(now + 10.0)  # nobody answers
    assert "likely a deadlock: rank 0 waits for rank 1, rank 1 waits for rank 2, rank 2 waits for rank 0\n" in said[0]
    report_wait(channel, 0, [1], "2: barrier()", "2", number=1)  # rank 0 has begun what rank 2 waits in
    stalls.tick(now + 20.0)
    stalls.tick(now + 30.0)
    assert len(said) == 2 and "likely a deadlock" not in said[1]


def test_a_stalled_job_is_ended_with_the_missing_ranks_named():
    channel, stalls, said = aggregator(warning=1.0, abort=2.0)
    report_wait(channel, 0, [1, 2], "ring: barrier()")
    now = time.monotonic()
    stalls.tick(now)
    channel.take()
    stalls.tick(now + 5.0)
    ((rank, kind, body),) = channel.take()
    assert (rank, kind, body["rank"]) == (0, "failed", 1)
    assert body["text"].startswith("ranks 1, 2 did not reach ring: barrier() within RING_STALL_ABORT=2 seconds")
    assert len(said) == 1


@pytest.fixture
def watch():
    """A rank's watch that has reported one wait of 60 seconds, its channel and failure detector."""
    now = time.monotonic()
    channel, detector = FakeChannel(rank=1), SimpleNamespace(deadlocks={})
    watch = StallWatch(channel, detector, list)
    long_waits["test"] = LongWait("ring", "ring: barrier()", 3, "", (0,), now - 60, now - 60)
    yield watch, channel, detector
    long_waits.pop("test", None)


def test_a_wait_is_reported_when_it_lasts_and_when_it_ends(watch):
    watch, channel, _ = watch
    watch.tick(time.monotonic())
    watch.tick(time.monotonic())
    ((rank, kind, body),) = channel.take()
    wait = body["wait"]
    assert (rank, kind, wait["what"], wait["missing"]) == (0, "report_wait", "ring: barrier()", (0,))
    assert wait["blocked_since"] >= 60
    del long_waits["test"]
    watch.tick(time.monotonic())
    assert channel.take() == [(0, "end_wait", {"number": body["number"]})]


def test_a_deadlock_ends_only_the_wait_it_is_about(watch):
    watch, channel, detector = watch
    watch.tick(time.monotonic())
    number = channel.take()[0][2]["number"]
    channel.receive(0, "declare_deadlock", {"number": number + 1, "communicator": "ring", "text": "never"})
    assert detector.deadlocks == {}
    channel.receive(0, "confirm_wait", {"number": number, "deadlock": {}})
    assert channel.take() == [(0, "answer_wait", {"waits": True, "deadlock": {}})]
    channel.receive(0, "declare_deadlock", {"number": number, "communicator": "ring", "text": "rank 1 waits"})
    assert detector.deadlocks == {"ring": "rank 1 waits"}


@pytest.mark.parametrize(
    ("entered", "is_idle", "waits"),
    [(7, True, True), (8, True, False), (9, True, False), (7, False, False), (8, False, False)],
)
def test_a_rank_that_has_begun_or_queued_what_the_other_waits_in_is_in_no_deadlock(watch, entered, is_idle, waits):
    watch, channel, detector = watch
    watch.tick(time.monotonic())
    number = channel.take()[0][2]["number"]
    wait = Wait("weights", None, 2)
    wait.entered, wait.background = entered, SimpleNamespace(unfinished=int(not is_idle))
    deadlock = {"needs": ["weights #2", 7, 0]}
    channel.receive(0, "confirm_wait", {"number": number, "deadlock": deadlock})
    assert channel.take() == [(0, "answer_wait", {"waits": waits, "deadlock": deadlock})]
    told = {"number": number, "communicator": "ring", "text": "rank 1 waits", "awaited": ["weights #2", 7, 0]}
    channel.receive(0, "declare_deadlock", told)
    assert detector.deadlocks == ({"ring": "rank 1 waits"} if waits else {})


def test_a_message_that_is_under_way_beside_the_script_may_be_what_the_other_waits_for(watch):
    watch, channel, _ = watch
    watch.tick(time.monotonic())
    number = channel.take()[0][2]["number"]
    deadlock = {"needs": ["group, 1 to 0, tag 3", 0, 0]}
    for waits in (True, False):
        channel.receive(0, "confirm_wait", {"number": number, "deadlock": deadlock})
        assert channel.take() == [(0, "answer_wait", {"waits": waits, "deadlock": deadlock})]
        now = time.monotonic()
        long_waits["message"] = LongWait("group, 1 to 0, tag 3", "send and recv", 0, "", (0,), now - 60, now)
    del long_waits["message"]


def test_a_rank_answers_with_its_stack(watch):
    _, channel, _ = watch
    channel.receive(0, "request_snapshot", {"inquiry": 8})
    ((rank, kind, body),) = channel.take()
    assert (rank, kind, body["inquiry"]) == (0, "report_snapshot", 8)
    assert body["stack"][-1][2] == "process_snapshot"


def test_waits_of_a_rank_without_which_the_job_goes_on_are_forgotten():
    members = Members(0, [Member(rank, rank, "a", 100 + rank, "a") for rank in range(3)])
    channel, stalls, said = aggregator(warning=1.0, members=members)
    report_wait(channel, 1, [0], "ring: barrier()")
    members.follow([0, 2], 1)
    report_wait(channel, 1, [2], "late: barrier()", number=1)  # sent before it died
    stalls.tick(time.monotonic())
    assert channel.take() == [] and said == []
