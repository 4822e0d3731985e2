"""Searches that run one fit after the other: Hydra's multirun has one directory a run, and lr_find one rate."""

import pytest

from tests.launch import run_ranks

SCRIPT = """
import os, sys
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner
import ring_plugins.lightning
from tests.worker import report

class Model(BoringModel):
    lr = 0.1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

def trainer():
    return Trainer(strategy="ring", devices=2, accelerator="cpu", max_epochs=1, limit_train_batches=12,
                   limit_val_batches=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                   enable_model_summary=False)
"""
HYDRA = """
import hydra
from hydra.core.hydra_config import HydraConfig

places = []

@hydra.main(version_base=None, config_path=None)
def main(config):
    one = trainer()
    one.fit(Model())
    places.append([os.getcwd(), HydraConfig.get().runtime.output_dir, config.x])
    report("places", places)

main()
"""
TUNER = """
torch.manual_seed(0)
model = Model()
found = Tuner(trainer()).lr_find(model, num_training=10, update_attr=True)
report("rates", [model.lr, found.results["lr"], found.results["loss"]])
"""


@pytest.mark.slow
def test_a_multirun_of_hydra_has_one_directory_a_run(tmp_path):
    pytest.importorskip("hydra")
    arguments = ["-m", "+x=1,2", "hydra.job.chdir=True", f"hydra.sweep.dir={tmp_path}"]
    first, second = run_ranks(SCRIPT + HYDRA, 2, args=arguments, timeout=180).values("places")
    assert first == second == [[str(tmp_path / str(run)), str(tmp_path / str(run)), run + 1] for run in (0, 1)]


@pytest.mark.slow
def test_the_tuner_finds_one_rate_on_all_ranks():
    first, second = run_ranks(SCRIPT + TUNER, 2, timeout=180).values("rates")
    assert first == second and len(first[1]) == len(first[2]) > 0
