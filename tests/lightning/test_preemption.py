"""All ranks of a Trainer stop after the same batch, save once and leave; SLURM is asked to start the job again."""

import json
import signal
import stat

import pytest

from ring_plugins.lightning.preemption import REQUEUE, STOP
from ring_plugins.lightning.same_loop import signals_of
from tests.launch import run_ranks

FIT = """
import json, os, signal, sys
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from ring_plugins.lightning import RingStrategy
from tests.worker import report

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].flatten().tolist())
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.layer(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(16.0).reshape(16, 1)), batch_size=2)

    val_dataloader = train_dataloader

class Signals(Callback):
    def send(self, trainer, place, batch):
        told = json.loads(os.environ.get("TEST_TOLD", "{}")).get(str(trainer.global_rank), [])
        if os.environ.get("TEST_PLACE", "train") == place and batch == 2:
            for number in told:
                os.kill(os.getpid(), number)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.send(trainer, "train", batch_idx)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.send(trainer, "validate", batch_idx)

    def on_exception(self, trainer, module, exception):
        report("stopped", [type(exception).__name__, trainer.global_step])

seed_everything(0)
model, root = Model(), os.environ["TEST_ROOT"]
arguments = json.loads(os.environ.get("TEST_ARGUMENTS", "{}"))
trainer = Trainer(
    strategy=RingStrategy(**arguments), devices=int(os.environ["TEST_RANKS"]), accelerator="cpu", max_epochs=2,
    default_root_dir=root, logger=False, enable_progress_bar=False, enable_model_summary=False,
    num_sanity_val_steps=0, callbacks=[Signals(), ModelCheckpoint(root, filename="last", save_on_exception=True)],
)
try:
    trainer.fit(model)
finally:
    report("end", [trainer.global_step, model.layer.weight.item(), model.seen])
"""


def fit(tmp_path, told, place="train", ranks=2, launcher="spawned", slurm=False, **arguments):
    """Run `FIT` with a `scontrol` that notes how it is called."""
    commands = tmp_path / "bin"
    commands.mkdir(exist_ok=True)
    (commands / "scontrol").write_text(f"#!/bin/sh\necho $* >> {tmp_path}/calls\n")
    (commands / "scontrol").chmod(stat.S_IRWXU)
    variables = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train"} if slurm else {}
    env = {"TEST_ROOT": str(tmp_path), "TEST_TOLD": json.dumps(told), "TEST_PLACE": place, **variables}
    env |= {"PATH": f"{commands}:/usr/bin:/bin", "TEST_ARGUMENTS": json.dumps(arguments)}
    return run_ranks(FIT, ranks, launcher, env=env, timeout=120, check=False)


def test_what_any_rank_was_told_counts():
    assert signals_of([STOP << 3, 4, REQUEUE << 3 | 1]) == STOP | REQUEUE
    assert signals_of([7, 5 << 32, 9 << 5]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "place", "arguments"),
    [
        ({1: [signal.SIGTERM]}, "train", {}),
        ({0: [signal.SIGTERM] * 2, 1: [signal.SIGTERM]}, "validate", {"uneven": "error"}),
        ({0: [signal.SIGTERM], 1: [signal.SIGTERM]}, "train", {"on_failure": "continue"}),
    ],
)
def test_all_ranks_stop_after_the_same_batch_and_rank_0_saves(tmp_path, told, place, arguments):
    result = fit(tmp_path, told, place, **arguments)
    (first, *_) = stopped = result.values("stopped")
    assert stopped == [["SIGTERMException", first[1]]] * 2, result
    assert first[1] == 4 if place == "validate" else first[1] in (3, 4), result
    assert (tmp_path / "last.ckpt").exists() and result.returncode == 143, result
    assert "Traceback" not in result.output, result


@pytest.mark.slow
@pytest.mark.parametrize("told", [{1: [signal.SIGUSR1]}, {0: [signal.SIGUSR1], 1: [signal.SIGUSR1, signal.SIGTERM]}])
def test_slurm_starts_the_job_again_and_it_resumes(tmp_path, told):
    result = fit(tmp_path, told, slurm=True)
    steps = [step for step, *_ in result.values("end")]
    assert steps[0] == steps[1] in (3, 4), result
    assert (tmp_path / "calls").read_text() == "requeue 77\n" and result.returncode == 143, result
    assert [path.name for path in tmp_path.glob("hpc_ckpt_*")] == ["hpc_ckpt_1.ckpt"]
    resumed = fit(tmp_path, {}, slurm=True)
    assert [step for step, *_ in resumed.values("end")] == [8, 8] and resumed.returncode == 0, resumed
    assert resumed.values("end")[0][1] == resumed.values("end")[1][1]
    assert len(resumed.values("end")[0][2]) < 8  # it has not begun anew
