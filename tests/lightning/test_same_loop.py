"""Ranks that leave an epoch alone, and metrics that only rank 0 reads."""

import pytest

from tests.launch import run_ranks

SCRIPT = """
import ring_plugins as ring
ring.init(ranks=2)

import os
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric
from ring_plugins.lightning import RingStrategy
from tests.worker import report

CASE = os.environ["TEST_CASE"]

class Data(IterableDataset):
    def __iter__(self):
        for number in range(4 + (CASE == "more" and ring.rank() == 1)):
            yield torch.full((2,), number + 10.0 * ring.rank())

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.mean = torch.nn.Linear(2, 1), MeanMetric()

    def training_step(self, batch, batch_idx):
        self.log("value", batch.mean(), on_epoch=True, sync_dist=True, prog_bar=True)
        self.mean.update(batch.mean())
        if CASE == "stop" and batch_idx == 1 and ring.rank() == 1:
            self.trainer.should_stop = True
        return self.layer(batch).mean()

    def on_train_epoch_end(self):
        self.log("mean", self.mean.compute(), prog_bar=True)
        self.mean.reset()

    def validation_step(self, batch, batch_idx):
        self.log("validated", batch.mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class OnRank0(Callback):
    @rank_zero_only
    def on_train_epoch_end(self, trainer, module):
        report("read", float(trainer.callback_metrics["value_epoch"]))

    @rank_zero_only
    def on_validation_epoch_end(self, trainer, module):
        report("validated", float(trainer.callback_metrics["validated"]))

trainer = Trainer(
    strategy=RingStrategy(uneven="error" if CASE == "more" else "join"), devices=2, accelerator="cpu", max_epochs=2,
    logger=False, enable_checkpointing=False,
    enable_model_summary=False, num_sanity_val_steps=0, callbacks=[OnRank0(), TQDMProgressBar()],
)
model = Model()
loop = trainer.fit_loop.epoch_loop
try:
    trainer.fit(model, DataLoader(Data(), 1), DataLoader(Data(), 1) if CASE != "stop" else None)
finally:
    report("replaced", [name for name in ("_broadcast_sigterm_tensor", "run") for one in (loop, loop.val_loop)
                        if name in vars(one)])
report("mean", float(trainer.callback_metrics["mean"]))
"""


@pytest.mark.slow
def test_metrics_that_rank_0_reads_alone_are_those_of_all_ranks():
    """By the default progress bar, while another number is computed from all ranks in the module's own hook."""
    result = run_ranks(SCRIPT, 2, env={"TEST_CASE": "even"}, timeout=90)
    everyones = (1.5 + 11.5) / 2
    assert result.values("read") == [everyones]
    assert result.values("validated") == [everyones]
    assert result.values("mean") == [everyones] * 2
    assert result.values("replaced") == [[]] * 2


@pytest.mark.parametrize(
    ("case", "where", "cause"),
    [
        pytest.param(
            "more",
            "after 4 batches of epoch 0, rank 0 validates, but rank 1 goes on",
            "give every rank the same number",
            marks=pytest.mark.slow,
        ),
        (
            "stop",
            "after 2 batches of epoch 0, rank 1 has left it, but rank 0 goes on",
            "should_stop is set on rank 1 only",
        ),
    ],
)
def test_all_ranks_hear_which_rank_left_an_epoch_alone_and_why(case, where, cause):
    result = run_ranks(SCRIPT, 2, env={"TEST_CASE": case}, timeout=90, check=False)
    assert result.returncode != 0
    for rank in range(2):
        (line,) = [line for line in result.output.splitlines() if f"rank {rank} ends because" in line]
        assert where in line and cause in line, result
    assert "Traceback" not in result.output
