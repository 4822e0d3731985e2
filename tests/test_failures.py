"""Whatever fails, no rank hangs: every process ends within ten seconds, and the first cause is printed.

`Job.wait` fails the test if a process, a file in shared memory or a temporary file is left. Plain pytest runs each
failure under the launchers that treat it differently; the others are marked slow.
"""

import re
import signal
import textwrap

import pytest

from tests.launch import Job, Result, run_ranks, slowness, start_ranks
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

# numpy's steps start in a tenth of the time of torch's; torch's have hooks and buckets, and need no compiler.
NUMPY = """
import numpy
def make_step():
    gradients = numpy.ones(1000)
    return lambda: ring.all_reduce(gradients, wait=False).wait()
"""
TORCH = """
from tests.campaigns.light_torch import import_torch
import_torch()
import torch
from ring_plugins.torch import DistributedOptimizer
torch.manual_seed(0)

def make_step(outputs=2):
    model = torch.nn.Linear(4, outputs)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    def step():
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
    return step
"""

ENDLESS = """
step = make_step()
step()
report_pid()
while True:
    step()
    time.sleep(0.01)
"""

# Rank 1 waits in a collective while rank 0 is busy outside of any.
BUSY = """
step = make_step()
step()
report_pid()
if ring.rank() == 0:
    time.sleep(600)
while True:
    step()
"""


def slow(*values: object, **options: str) -> object:
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def script(body: str, steps: str = NUMPY) -> str:
    return COMMON + steps + textwrap.dedent(body)


def check_end(job: Job, *causes: str) -> Result:
    """The job ends in time with a bad status, and prints every cause (a regular expression)."""
    return check_causes(job.wait(SECONDS), *causes)


def run_failing(body: str, launcher: Launcher, *causes: str, steps: str = NUMPY) -> Result:
    """Run a script that fails by itself; the ten seconds begin when a rank first calls `goes_wrong()`."""
    result = run_ranks(script(body, steps), 2, launcher, timeout=60, check=False)
    assert result.ended - min(result.values("wrong")) <= SECONDS * slowness(), result
    return check_causes(result, *causes)


def check_causes(result: Result, *causes: str) -> Result:
    assert result.returncode != 0, result
    for cause in causes:
        assert re.search(cause, result.output), f"nothing about {cause!r} in\n{result}"
    return result


def test_sigkill_of_a_rank_in_a_torch_loop():
    with start_ranks(script(ENDLESS, TORCH)) as job:
        job.send_signal(1, signal.SIGKILL)
        check_end(job, r"rank 1\b", r"died|killed|signal")


@pytest.mark.parametrize(
    ("launcher", "body", "number"),
    [
        pytest.param("spawned", ENDLESS, signal.SIGKILL, id="spawned-in step-SIGKILL"),
        pytest.param("spawned", BUSY, signal.SIGTERM, id="spawned-peer busy-SIGTERM"),
        pytest.param("mpirun", BUSY, signal.SIGKILL, id="mpirun-peer busy-SIGKILL"),
        slow("mpirun", ENDLESS, signal.SIGTERM, id="mpirun-in step-SIGTERM"),
    ],
)
def test_signal_to_rank_1(launcher, body, number):
    with start_ranks(script(body), 2, launcher) as job:
        job.send_signal(1, number)
        result = check_end(job, r"rank 1\b", r"died|killed|signal|terminated")
    assert result.returncode == 128 + number, result


@pytest.mark.parametrize("launcher", ["spawned", "mpirun"])
def test_sigkill_of_rank_0(launcher):
    with start_ranks(script(ENDLESS), 2, launcher) as job:
        job.send_signal(0, signal.SIGKILL)
        if launcher == "mpirun":
            check_end(job, r"rank 0\b")
        else:  # which the user's shell started; it has spawned the other rank
            check_end(
                job, r"rank 1 ends because rank 0 \(process \d+\) died without reporting an error; it was killed by"
            )


def test_sigkill_of_a_rank_under_torchrun():
    with start_ranks(script(ENDLESS), 2, "torchrun") as job:
        job.send_signal(1, signal.SIGKILL)
        check_end(job, r"rank\W+1\b")


def test_sigkill_of_one_of_three():
    with start_ranks(script(ENDLESS), 3) as job:
        job.send_signal(2, signal.SIGKILL)
        check_end(job, r"rank 2\b.*died")


@pytest.mark.parametrize(
    ("launcher", "body"),
    [
        pytest.param("spawned", ENDLESS, id="spawned-in step"),
        pytest.param("spawned", BUSY, id="spawned-peer busy"),
        pytest.param("mpirun", BUSY, id="mpirun-peer busy"),
        slow("torchrun", ENDLESS, id="torchrun-in step"),
    ],
)
def test_ctrl_c(launcher, body):
    with start_ranks(script(body), 2, launcher) as job:
        job.pids()
        job.interrupt()
        # mpirun and torchrun may end the ranks before these can print anything.
        check_end(job, *(["KeyboardInterrupt"] if launcher == "spawned" else []))


@pytest.mark.parametrize("launcher", ["spawned", "mpirun", slow("torchrun")])
def test_sigterm_to_the_process_that_the_user_started(launcher):
    with start_ranks(script(ENDLESS), 2, launcher) as job:
        job.pids()
        job.signal_parent(signal.SIGTERM)
        check_end(job)


def test_sigkill_to_the_process_that_the_user_started(launcher):
    with start_ranks(script(ENDLESS), 2, launcher) as job:
        job.pids()
        job.signal_parent(signal.SIGKILL)
        # A killed mpirun cannot remove Open MPI's own segments.
        check_causes(job.wait(SECONDS, ignore_files=["sm_segment.*", "*openmpi*", "prte*"]))


@pytest.mark.parametrize(
    ("launcher", "failing", "steps"),
    [
        pytest.param("spawned", 1, TORCH, id="spawned-1-torch"),
        pytest.param("spawned", 0, NUMPY, id="spawned-0"),
        pytest.param("mpirun", 1, NUMPY, id="mpirun-1"),
        slow("torchrun", 0, NUMPY, id="torchrun-0"),
        slow("mpirun", 1, TORCH, id="mpirun-1-torch"),
    ],
)
def test_exception_on_one_rank(launcher, failing, steps):
    body = f"""
    step = make_step()
    for number in range(100000):
        if ring.rank() == {failing} and number == 5:
            goes_wrong()
            raise ValueError("the loss is not finite")
        step()
    """
    causes = (rf"rank {failing} failed", r"script.py\", line \d+", "ValueError: the loss is not finite")
    result = run_failing(body, launcher, *causes, steps=steps)
    if launcher != "torchrun":  # its agent adds a traceback of its own
        assert result.output.count("Traceback (most recent call last)") == 1, f"a cascade\n{result}"


@pytest.mark.parametrize("launcher", ["spawned", "mpirun", slow("torchrun")])
def test_exception_on_one_rank_while_the_other_computes(launcher):
    body = """
    make_step()()
    if ring.rank() == 0:
        time.sleep(600)
    goes_wrong()
    raise ValueError("the loss is not finite")
    """
    run_failing(body, launcher, "rank 1 failed", "ValueError: the loss is not finite")


@pytest.mark.parametrize("launcher", ["spawned", slow("mpirun")])
def test_exception_inside_backward(launcher):
    body = """
    step = make_step()
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
    run_failing(body, launcher, "rank 1 failed", "ValueError: no such gradient", steps=TORCH)


@pytest.mark.parametrize("launcher", ["spawned", slow("mpirun")])
def test_different_models(launcher):
    body = """
    make_step()()
    goes_wrong()
    make_step(outputs=2 + ring.rank())()
    """
    run_failing(body, launcher, "weight", r"rank 1\b", "MismatchError", steps=TORCH)


@pytest.mark.parametrize("launcher", ["spawned", "mpirun", slow("torchrun")])
def test_different_numbers_of_steps(launcher):
    body = """
    step = make_step()
    for _ in range(5 + ring.rank()):
        step()
    goes_wrong()
    """
    run_failing(body, launcher, r"rank 0 has left the job", "different numbers of steps")


@pytest.mark.parametrize("launcher", ["spawned", slow("mpirun")])
def test_one_rank_waits_in_another_operation(launcher):
    body = """
    step = make_step()
    step()
    goes_wrong()
    if ring.rank() == 0:
        ring.barrier()
    else:
        step()
        step()
    """
    causes = (r"rank [01] waits for rank [01] in ring: barrier\(\)", "took different paths")
    run_failing(body, launcher, *causes, steps=TORCH)


@pytest.mark.parametrize(
    ("launcher", "leave"),
    [("spawned", "sys.exit(3)"), ("spawned", "exit(3)"), ("mpirun", "sys.exit(3)"), slow("torchrun", "sys.exit(3)")],
)
def test_exit_with_a_status_on_one_rank(launcher, leave):
    body = f"""
    step = make_step()
    for number in range(100000):
        if ring.rank() == 1 and number == 5:
            goes_wrong()
            {leave}
        step()
    """
    # mpirun and torchrun may end rank 0 before it can print anything.
    cause = (
        r"rank 0 ends because rank 1 ended with exit status 3 \(sys.exit\), while rank 0 waits for it in ring: all_red"
    )
    result = run_failing(body, launcher, r"rank\W+1\b", *([cause] if launcher == "spawned" else []))
    assert result.returncode == (1 if launcher == "torchrun" else 3), result


@pytest.mark.parametrize("launcher", ["spawned", "mpirun"])
def test_exit_with_a_status_at_the_end_is_the_status_of_the_job(launcher):
    body = """
    make_step()()
    goes_wrong()
    sys.exit(3 * ring.rank())
    """
    assert run_failing(body, launcher).returncode == 3


@pytest.mark.parametrize("launcher", ["spawned", "mpirun", slow("torchrun")])
def test_exit_before_init(launcher):
    body = textwrap.dedent(
        """
        import os, time
        if os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))) == "1":
            time.sleep(2)  # Open MPI's mpirun hangs if a rank ends while another one connects to it
            raise ValueError("no data on this rank")
        """
    )
    result = run_ranks(body + COMMON, 2, launcher, timeout=30, check=False)
    check_causes(result, "ValueError: no data on this rank")
