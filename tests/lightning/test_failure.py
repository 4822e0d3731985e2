"""A failure or signal that ends one rank ends all within seconds, with a nonzero status and a visible cause."""

import re
import signal

import lightning.pytorch
import pytest

from ring_plugins.lightning.launcher import set_exit_status
from tests.launch import Job, Launcher, Result, start_ranks
from tests.launchers import LAUNCHERS

# Ranks that start before Lightning is imported import it in parallel. Without these lines the Trainer starts them, as
# in most scripts.
RANKS_FIRST = """
import ring_plugins
ring_plugins.init(ranks=2)
"""

TRAIN = """
import sys, time
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from ring_plugins.lightning import RingStrategy
from tests.worker import report_pid, report

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 4:
            report_pid()
        if {condition}:
            {action}
        time.sleep(0.005)
        return super().training_step(batch, batch_idx)

class Cleanup(Callback):
    def on_exception(self, trainer, module, exception):
        report("on_exception", type(exception).__name__)
        trainer.strategy.barrier("cleanup")  # must not hang

if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.randn(20000, 32))
    Trainer(strategy=RingStrategy(), devices=2, accelerator="cpu", max_epochs=1, logger=False, callbacks=[Cleanup()],
            enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False).fit(Model(), data)
"""


def training(condition: str = "False", action: str = "pass") -> str:
    return TRAIN.format(condition=condition, action=action)


def ends_in_time(job: Job) -> Result:
    result = job.wait(10)  # more on a busy machine
    assert result.returncode != 0
    return result


@pytest.mark.parametrize(
    "launcher", ["spawned", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpirun", "torchrun"))]
)
def test_an_exception_on_one_rank(launcher: Launcher) -> None:
    script = training("batch_idx == 6 and self.global_rank == 1", "raise ValueError('the first cause')")
    with start_ranks(script, launcher=launcher) as job:
        job.pids()
        result = ends_in_time(job)
    # The failing rank's own traceback; the others say one line, if the launcher leaves them the time.
    assert re.search(r"Traceback.*training_step.*ValueError: the first cause", result.stderr, re.DOTALL)
    assert result.stderr.count("\nTraceback") <= (2 if launcher == "torchrun" else 1)  # torchrun adds its own
    assert result.reports[1]["on_exception"] == "ValueError"
    if launcher == "spawned":
        assert re.search(r"rank 0 ends because rank 1 failed: ValueError: the first cause", result.stderr)
        assert result.reports[0]["on_exception"] == "PeerFailed"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_exception_on_all_ranks_shows_one_traceback(launcher: Launcher) -> None:
    """Each rank reports its failure before it prints it, so none may rely on any other to show it."""
    with start_ranks(training("batch_idx == 6", "raise ValueError('the first cause')"), launcher=launcher) as job:
        job.pids()
        result = ends_in_time(job)
    assert re.search(r"Traceback.*training_step.*ValueError: the first cause", result.stderr, re.DOTALL), result
    assert result.stderr.count("\nTraceback") <= (2 if launcher == "torchrun" else 1), result


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_reaching_one_rank(rank: int) -> None:
    with start_ranks(training() if rank else RANKS_FIRST + training()) as job:
        job.pids()
        job.send_signal(rank, signal.SIGINT)
        result = ends_in_time(job)
    assert result.values("on_exception")[rank] == "KeyboardInterrupt"
    assert "KeyboardInterrupt" in result.output


@pytest.mark.parametrize("signaled", [[1], *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in ([0], [0, 1]))])
def test_sigterm(signaled: list[int]) -> None:
    with start_ranks(training() if signaled == [0] else RANKS_FIRST + training()) as job:
        job.pids()
        for rank in signaled:
            job.send_signal(rank, signal.SIGTERM)
        result = ends_in_time(job)
    assert "SIGTERMException" in result.values("on_exception")


DIFFERENT = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import rank_zero_only
import ring_plugins.lightning

class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 2, bias=rank_zero_only.rank == 0)

if __name__ == "__main__":
    Trainer(strategy="ring", devices=2, accelerator="cpu", max_epochs=1, logger=False, limit_train_batches=4,
            enable_checkpointing=False, enable_progress_bar=False).fit(Model())
"""


@pytest.mark.slow
def test_different_models() -> None:
    with start_ranks(RANKS_FIRST + DIFFERENT) as job:
        result = job.wait(40)
    assert result.returncode != 0
    assert "layer.bias" in result.stderr


SURVIVOR = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from tests.worker import report
import ring_plugins.lightning

class TooLarge(BoringModel):
    def training_step(self, batch, batch_idx):
        raise MemoryError("too large")

def trainer():
    return Trainer(strategy="ring", devices=2, accelerator="cpu", max_epochs=1, logger=False, limit_train_batches=4,
                   enable_checkpointing=False, enable_progress_bar=False)

if __name__ == "__main__":
    try:
        trainer().fit(TooLarge())
    except MemoryError:
        model = BoringModel()
        own = trainer()
        own.fit(model)
        report("weights", model.layer.weight.detach(), own.global_rank)
"""


@pytest.mark.slow
def test_an_error_that_all_ranks_catch_is_survived() -> None:
    with start_ranks(RANKS_FIRST + SURVIVOR) as job:
        result = job.wait(40)
    assert result.returncode == 0, result
    first, second = result.values("weights")
    assert first == second


INTERRUPTED = """
import signal
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from tests.worker import report
import ring_plugins.lightning

class Interrupted(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.global_rank == 0:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)

def trainer():
    return Trainer(strategy="ring", devices=2, accelerator="cpu", max_epochs=1, logger=False, limit_train_batches=4,
                   enable_checkpointing=False, enable_progress_bar=False)

if __name__ == "__main__":
    first = trainer()
    try:
        first.fit(Interrupted())
    except BaseException as error:  # Lightning makes a SystemExit of the interrupt
        report("error", f"{type(error).__name__}: {error}", first.global_rank)
    model, second = BoringModel(), {second}
    torch.manual_seed(3 + second.global_rank)
    second.fit(model)
    report("weights", model.layer.weight.detach(), second.global_rank)
"""


@pytest.mark.parametrize("second", ["trainer()", "first"])
@pytest.mark.slow
def test_after_an_interrupt_that_all_ranks_catch_they_fit_again(second: str) -> None:
    with start_ranks(RANKS_FIRST + INTERRUPTED.replace("{second}", second)) as job:
        result = job.wait(60)
    assert result.returncode == 0, result
    assert result.values("error")[0] == "SystemExit: 1"
    assert "rank 0" in result.values("error")[1] and "KeyboardInterrupt" in result.values("error")[1]
    first_rank, second_rank = result.values("weights")
    assert first_rank == second_rank


def test_sigterm_is_not_success():
    error = lightning.pytorch.utilities.exceptions.SIGTERMException()
    set_exit_status(error)
    assert error.code == 143
