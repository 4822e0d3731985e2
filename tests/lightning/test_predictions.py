"""Predictions of all ranks in the order of the data."""

import pytest
import torch

from ring_plugins.lightning.predictions import put_together, taken_apart
from tests.launch import run_ranks


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(6).view(3, 2),
        {"class": torch.arange(3), "name": ["a", "b", "c"]},
        (torch.arange(3), {"x": torch.zeros(3, 1)}),
        ["a", "b", "c"],
    ],
)
def test_a_batch_is_taken_apart_and_put_together(batch):
    samples = taken_apart(batch, 3)
    assert len(samples) == 3
    assert str(put_together(samples)) == str(batch)


@pytest.mark.parametrize("batch", [torch.tensor(3.0), torch.zeros(2), None, {"x": 3}])
def test_what_has_no_part_for_each_sample_is_not(batch):
    with pytest.raises(ValueError, match="for 3 samples"):
        taken_apart(batch, 3)


SCRIPT = """
import os
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
import ring_plugins as ring
from ring_plugins.lightning import RingStrategy
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))

class Model(LightningModule):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"double": 2 * batch, "name": [f"sample {int(one)}" for one in batch]}

class Boxes(Model):
    def predict_step(self, batch, batch_idx):
        return [torch.full((int(one) % 3, 2), int(one)) for one in batch]  # so many boxes in each image

trainer = Trainer(
    strategy=RingStrategy(gather_predictions=True), devices=ring.size(), accelerator="cpu", logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
for count in (4, 7):
    loaders = [DataLoader(range(count), 2), DataLoader(range(count), 3, sampler=list(reversed(range(count))))]
    first, second = trainer.predict(Model(), loaders)
    report(f"{count}", [[batch["double"].tolist() for batch in some] for some in (first, second)])
    boxes = trainer.predict(Boxes(), DataLoader(range(count), 2))
    report(f"boxes {count}", [one.tolist() for batch in boxes for one in batch])
    report(f"names {count}", [name for batch in second for name in batch["name"]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_predict_returns_the_predictions_of_all_ranks_in_order(count):
    result = run_ranks(SCRIPT, count, timeout=120)
    for samples in (4, 7):
        forward, backward = list(range(0, 2 * samples, 2)), list(range(2 * samples - 2, -1, -2))
        first = [forward[i : i + 2] for i in range(0, samples, 2)]
        second = [backward[i : i + 3] for i in range(0, samples, 3)]
        assert result.values(f"{samples}") == [[first, second]] * count
        assert result.values(f"names {samples}") == [[f"sample {i}" for i in reversed(range(samples))]] * count
        assert result.values(f"boxes {samples}") == [[[[i, i]] * (i % 3) for i in range(samples)]] * count
