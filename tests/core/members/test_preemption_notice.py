"""SIGTERM is a notice where the script has no handler of its own, and ends the process where there is no notice."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ring_plugins.core.members.preemption_notice import PreemptionNotice
from tests.launch import REPOSITORY, run_ranks


@pytest.fixture(autouse=True)
def handler():
    """SIGTERM's handler, as Python sets it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_is_noted_and_the_second_ends_the_process():
    child = os.fork()
    if not child:
        notice = PreemptionNotice()
        notice.install()
        os.kill(os.getpid(), signal.SIGTERM)
        if not notice.given:
            os._exit(1)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_forked_child_is_ended_by_its_first_signal():
    notice = PreemptionNotice()
    notice.install()
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not notice.given
    notice.close()


def test_a_handler_of_the_script_stays():
    def own(*_):
        pass

    signal.signal(signal.SIGTERM, own)
    notice = PreemptionNotice()
    notice.install()
    notice.close()
    assert signal.getsignal(signal.SIGTERM) is own and not notice.is_installed


def test_a_handler_that_the_script_sets_later_stays():
    def own(*_):
        pass

    notice = PreemptionNotice()
    notice.install()
    signal.signal(signal.SIGTERM, own)
    notice.close()
    assert signal.getsignal(signal.SIGTERM) is own


def test_signals_do_again_what_they_did_when_nobody_asks_any_longer():
    notice = PreemptionNotice()
    notice.install()
    notice.ask()
    notice.withdraw()
    assert notice.is_installed and not notice.is_asked  # in a job that goes on after losses
    notice.close()
    notice.ask()
    notice.withdraw()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not notice.is_installed


def test_a_signal_that_was_not_heeded_ends_the_process_when_nobody_asks_any_longer():
    child = os.fork()
    if not child:
        notice = PreemptionNotice()
        notice.ask()
        os.kill(os.getpid(), signal.SIGTERM)
        notice.withdraw()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_thread_installs_nothing():
    notice = PreemptionNotice()
    thread = threading.Thread(target=notice.install)
    thread.start()
    thread.join()
    assert not notice.is_installed and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_signal_ends_the_process_again_after_close():
    notice = PreemptionNotice()
    notice.install()
    notice.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_script_that_asks_gets_any_number_of_signals():
    notice = PreemptionNotice()
    notice.ask()
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    assert notice.given and not notice.of_job
    notice.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("in_slurm", [True, False])
def test_sigusr1_is_a_notice_of_slurms_only(in_slurm, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7") if in_slurm else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    notice = PreemptionNotice()
    notice.ask()
    assert (signal.getsignal(signal.SIGUSR1) == notice._note) == in_slurm
    if in_slurm:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert notice.of_job == in_slurm and not notice.given
    notice.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    signal.signal(signal.SIGUSR1, before)


ASKS = """
import os, signal, sys, time
import torch
import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure=os.environ.get("TEST_ON_FAILURE"))
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
told = [int(rank) for rank in os.environ["TEST_TOLD"].split(",")]
report("began", [])
steps = []
for step in range(8):
    if os.environ["TEST_PASSES"] == "1":
        optimizer.zero_grad()
        model(torch.full((1, 2), float(ring.rank()))).sum().backward()
        optimizer.step()
    steps.append(step)
    if ring.preempted():
        time.sleep(0.3 * (ring.rank() == 0))  # while it writes
        report("saved", steps)
        ring.barrier()
        sys.exit(143)
    if step == 3 and ring.rank() in told:
        for number in os.environ["TEST_SIGNALS"].split(","):
            os.kill(os.getpid(), int(number))
report("ended", [ring.size(), len(steps)])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "told", "signals", "passes"),
    [
        ("spawned", "1", [signal.SIGTERM], True),
        ("torchrun", "0,2", [signal.SIGTERM], False),
        ("mpirun", "0,1,2", [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM], True),
    ],
)
def test_all_ranks_save_after_the_same_step_and_leave(launcher, told, signals, passes):
    env = {"TEST_TOLD": told, "TEST_SIGNALS": ",".join(str(int(one)) for one in signals), "SLURM_JOB_ID": "7"}
    result = run_ranks(ASKS, 3, launcher, env={**env, "TEST_PASSES": str(int(passes))}, timeout=120, check=False)
    assert result.values("saved") == [[0, 1, 2, 3, 4]] * 3, result
    assert result.returncode == (1 if launcher == "torchrun" else 143), result
    assert "Traceback" not in result.output or launcher == "torchrun", result


@pytest.mark.slow
@pytest.mark.parametrize(("told", "number"), [("0,1,2", signal.SIGTERM), ("1", signal.SIGTERM)])
def test_a_job_that_goes_on_after_losses_ends_as_a_whole_only_if_it_has_to(told, number):
    env = {"TEST_TOLD": told, "TEST_SIGNALS": str(int(number)), "TEST_PASSES": "1", "TEST_ON_FAILURE": "continue"}
    result = run_ranks(ASKS, 3, env={**env, "SLURM_JOB_ID": "7"}, timeout=120, check=False)
    if told == "1" and number == signal.SIGTERM:
        assert result.values("ended") == [[2, 8]] * 2, result
        assert "left on SIGTERM" in result.output and result.returncode == 0, result
    else:
        assert result.values("saved") == [[0, 1, 2, 3, 4]] * 3, result
        assert result.returncode == 143, result


IN_GROUPS = """
import os, signal, sys
import torch
import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer
from tests.worker import report

ring.init(ranks=3)
torch.manual_seed(0)
kind = os.environ["TEST_KIND"]
mine = ring.Group.split(ring.rank() == 2)  # ranks 0 and 1, and rank 2 alone
models = [torch.nn.Linear(2, 1) for _ in range(2)]
optimizers = [
    DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), group=group)
    for model, group in zip(models, [mine, mine if kind == "groups" else None])
]
steps = []
for step in range(6):
    for model, optimizer in zip(reversed(models), reversed(optimizers)):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step == 2 and ring.rank() == 0 and kind == "layers":  # known to the group's next pass, but not to all
            os.kill(os.getpid(), signal.SIGTERM)
            kind = ""
    if step == 2 and ring.rank() == 2 and kind == "groups":
        os.kill(os.getpid(), signal.SIGTERM)
    steps.append(step)
    if ring.preempted():
        break
report("steps", steps)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "steps"), [("layers", [4, 4, 4]), ("groups", [6, 6, 3])])
def test_what_a_group_averages_does_not_tell_some_ranks_of_the_end_before_others(kind, steps):
    result = run_ranks(IN_GROUPS, 3, env={"TEST_KIND": kind}, timeout=120)
    assert [len(of_rank) for of_rank in result.values("steps")] == steps, result


KERAS_IN_GROUPS = """
import os, signal
import keras
import numpy as np
import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback
from tests.worker import report

class Ask(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 2 and ring.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        self.model.stop_training |= ring.preempted()

ring.init(ranks=3)
x = np.arange(24, dtype="float32").reshape(12, 2) * (ring.rank() + 1)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
ask, mine = Ask(), ring.Group.split(ring.rank() == 2)
ring.preempted()
model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[ask, BroadcastCallback(group=mine)])
report("steps", ask.steps)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_fit_in_a_group_ends_with_those_in_others(backend):
    result = run_ranks(KERAS_IN_GROUPS, 3, env={"KERAS_BACKEND": backend}, timeout=120)
    assert result.values("steps") == [2, 2, 2], result


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes PID namespaces")
@pytest.mark.parametrize("asks", [False, True])
def test_a_containers_first_process_heeds_the_signal(asks, tmp_path):
    """The kernel keeps signals that have no handler from it, and so would a second one after `close`."""
    lines = ["import time", "from ring_plugins.core.members.preemption_notice import PreemptionNotice"]
    lines += ["notice = PreemptionNotice()", *(["notice.ask()", "notice.close()"] if asks else [])]
    (tmp_path / "script.py").write_text("\n".join([*lines, "print('ready', flush=True)", "time.sleep(60)"]))
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, tmp_path / "script.py"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as job:
        assert job.stdout.readline() == "ready\n"
        (first,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert job.wait(60) == 143
