"""Whoever fails, nobody hangs: every process ends within ten seconds, and the first cause can be read.

`Job.wait` fails the test where a process, a file in shared memory or a temporary file is left.
"""

import re
import signal
import textwrap

import pytest

from tests.launch import Job, Result, run_ranks, start_ranks
from tests.launchers import Launcher

SECONDS = 10

COMMON = """
import os, sys, time
import ring_plugins as ring
from tests.worker import report, report_pid

ring.init(ranks=int(os.environ["TEST_RANKS"]))

def goes_wrong():
    report("wrong", time.time())
"""

# A step of each kind. Numpy's starts in a tenth of the time; PyTorch's is the one with hooks and buckets.
NUMPY = """
import numpy
def learner():
    gradients = numpy.ones(1000)
    return lambda: ring.all_reduce(gradients, wait=False).wait()
"""
TORCH = """
import torch
from ring_plugins.torch import DistributedOptimizer
torch.manual_seed(0)

def learner(outputs=2):
    model = torch.nn.Linear(4, outputs)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    def step():
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
    return step
"""

FOR_EVER = """
step = learner()
step()
report_pid()
while True:
    step()
    time.sleep(0.01)
"""

# One rank is inside a collective, the other far away from any.
BUSY = """
step = learner()
step()
report_pid()
if ring.rank() == 0:
    time.sleep(600)
while True:
    step()
"""


def script(body: str, learner: str = NUMPY) -> str:
    return COMMON + learner + textwrap.dedent(body)


def after(job: Job, *causes: str) -> Result:
    """The end of a job that something was done to: in time, with a bad status, and with every cause in its output."""
    result = job.wait(SECONDS)
    return explained(result, *causes)


def run(body: str, launcher: Launcher, *causes: str, learner: str = TORCH) -> Result:
    """A script that fails by itself; the ten seconds begin when a rank first calls `goes_wrong()`."""
    result = run_ranks(script(body, learner), 2, launcher, timeout=60, check=False)
    assert result.ended - min(result.values("wrong")) <= SECONDS, result
    return explained(result, *causes)


def explained(result: Result, *causes: str) -> Result:
    assert result.returncode != 0, result
    for cause in causes:
        assert re.search(cause, result.output), f"nothing about {cause!r} in\n{result}"
    return result


# A rank ends by a signal --------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["spawned", "mpirun"])
def test_sigkill_of_a_rank_in_a_torch_loop(launcher):
    with start_ranks(script(FOR_EVER, TORCH), 2, launcher) as job:
        job.send_signal(1, signal.SIGKILL)
        after(job, r"rank 1\b", r"died|killed|signal")


@pytest.mark.parametrize(
    ("launcher", "body", "number"),
    [  # every two of the three meet
        pytest.param("spawned", FOR_EVER, signal.SIGKILL, id="spawned-in step-SIGKILL"),
        pytest.param("spawned", BUSY, signal.SIGTERM, id="spawned-peer busy-SIGTERM"),
        pytest.param("mpirun", FOR_EVER, signal.SIGTERM, id="mpirun-in step-SIGTERM"),
        pytest.param("mpirun", BUSY, signal.SIGKILL, id="mpirun-peer busy-SIGKILL"),
    ],
)
def test_signal_to_rank_1(launcher, body, number):
    with start_ranks(script(body), 2, launcher) as job:
        job.send_signal(1, number)
        after(job, r"rank 1\b", r"died|killed|signal|terminated")


@pytest.mark.parametrize("launcher", ["spawned", "mpirun"])
def test_sigkill_of_rank_0(launcher):
    with start_ranks(script(FOR_EVER), 2, launcher) as job:
        job.send_signal(0, signal.SIGKILL)
        # Grown, rank 0 is the process in the user's terminal, and the shell says "Killed".
        after(job, *([r"rank 0\b"] if launcher == "mpirun" else []))


def test_sigkill_of_a_rank_under_torchrun():
    with start_ranks(script(FOR_EVER), 2, "torchrun") as job:
        job.send_signal(1, signal.SIGKILL)
        after(job, r"rank\W+1\b")


def test_sigkill_of_one_among_three():
    with start_ranks(script(FOR_EVER), 3) as job:
        job.send_signal(2, signal.SIGKILL)
        after(job, r"rank 2\b.*died")


# The user, or a scheduler, ends the job -------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "body"),
    [
        pytest.param("spawned", FOR_EVER, id="spawned-in step"),
        pytest.param("spawned", BUSY, id="spawned-peer busy"),
        pytest.param("mpirun", BUSY, id="mpirun-peer busy"),
        pytest.param("torchrun", FOR_EVER, id="torchrun-in step"),
    ],
)
def test_ctrl_c(launcher, body):
    with start_ranks(script(body), 2, launcher) as job:
        job.pids()
        job.interrupt()
        # mpirun and torchrun may end the ranks before these can say anything.
        after(job, *(["KeyboardInterrupt"] if launcher == "spawned" else []))


def test_sigterm_to_what_the_user_started(launcher):
    with start_ranks(script(FOR_EVER), 2, launcher) as job:
        job.pids()
        job.signal_parent(signal.SIGTERM)
        after(job)


def test_sigkill_to_what_the_user_started(launcher):
    with start_ranks(script(FOR_EVER), 2, launcher) as job:
        job.pids()
        job.signal_parent(signal.SIGKILL)
        # Open MPI's own segments, which a killed mpirun cannot remove.
        explained(job.wait(SECONDS, ignore_files=["sm_segment.*", "*openmpi*", "prte*"]))


# The script goes wrong on one rank --------------------------------------------------------------------


RAISES = """
step = learner()
for number in range(100000):
    if ring.rank() == FAILING and number == 5:
        goes_wrong()
        raise ValueError("the loss is not finite")
    step()
"""


@pytest.mark.parametrize(("launcher", "failing"), [("spawned", 0), ("spawned", 1), ("mpirun", 1), ("torchrun", 0)])
def test_exception_on_one_rank(launcher, failing):
    body = RAISES.replace("FAILING", str(failing))
    result = run(
        body, launcher, rf"rank {failing} failed", r"script.py\", line \d+", "ValueError: the loss is not finite"
    )
    if launcher != "torchrun":  # whose agent adds a traceback of its own
        assert result.output.count("Traceback (most recent call last)") == 1, f"a cascade\n{result}"


def test_exception_on_one_rank_while_the_other_computes(launcher):
    body = """
    learner()()
    if ring.rank() == 0:
        time.sleep(600)
    goes_wrong()
    raise ValueError("the loss is not finite")
    """
    run(body, launcher, "rank 1 failed", "ValueError: the loss is not finite", learner=NUMPY)


@pytest.mark.parametrize("launcher", ["spawned", "mpirun"])
def test_exception_inside_backward(launcher):
    body = """
    step = learner()
    step()
    model = torch.nn.Linear(4, 2)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loss = model(torch.ones(8, 4)).sum()
    def explode(gradient):
        goes_wrong()
        raise ValueError("no such gradient")
    if ring.rank() == 1:
        loss.register_hook(explode)
    loss.backward()
    optimizer.step()
    step()
    """
    run(body, launcher, "rank 1 failed", "ValueError: no such gradient")


@pytest.mark.parametrize("launcher", ["spawned", "mpirun"])
def test_different_models(launcher):
    body = """
    learner()()
    goes_wrong()
    learner(outputs=2 + ring.rank())()
    """
    run(body, launcher, "weight", r"rank 1\b", "MismatchError")


def test_different_numbers_of_steps(launcher):
    body = """
    step = learner()
    for _ in range(5 + ring.rank()):
        step()
    goes_wrong()
    """
    run(body, launcher, r"rank 0\b.* ended", "different numbers of steps")


@pytest.mark.parametrize("launcher", ["spawned", "mpirun"])
def test_one_rank_waits_in_another_operation(launcher):
    body = """
    step = learner()
    step()
    goes_wrong()
    if ring.rank() == 0:
        ring.barrier()
    else:
        step()
        step()
    """
    run(body, launcher, r"rank [01] waits for rank [01] in ring: barrier\(\)", "took different paths")


def test_exit_with_a_status_on_one_rank(launcher):
    body = """
    step = learner()
    for number in range(100000):
        if ring.rank() == 1 and number == 5:
            goes_wrong()
            sys.exit(3)
        step()
    """
    run(body, launcher, r"rank\W+1\b", learner=NUMPY)


@pytest.mark.parametrize("launcher", ["spawned", "mpirun"])
def test_exit_with_a_status_at_the_end_is_the_status_of_the_job(launcher):
    body = """
    learner()()
    goes_wrong()
    sys.exit(3 * ring.rank())
    """
    assert run(body, launcher, learner=NUMPY).returncode == 3


def test_exit_before_init(launcher):
    body = textwrap.dedent(
        """
        import os, time
        if os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))) == "1":
            time.sleep(2)  # Open MPI's mpirun hangs if a rank ends in the moment in which another connects to it
            raise ValueError("no data on this rank")
        """
    )
    result = run_ranks(body + COMMON, 2, launcher, timeout=30, check=False)
    explained(result, "ValueError: no data on this rank")
