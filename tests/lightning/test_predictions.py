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
from lightning.pytorch.callbacks import BasePredictionWriter
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
class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.written = []

    def write_on_batch_end(self, trainer, module, prediction, indices, *_):
        self.written += indices

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.written.append([sum(map(len, indices)), len(predictions)])

def predict(loaders, gathers, *callbacks):
    trainer.strategy._gathers, trainer.callbacks = gathers, list(callbacks)
    return trainer.predict(Model(), loaders)

def doubles(found):
    return None if found is None else [batch["double"].tolist() for batch in found]

for count in (1, 2, 5):  # fewer samples than ranks, too
    for gathers in (True, "rank 0", False):
        writer = Writer()
        found = predict(DataLoader(range(count), 2, drop_last=True), gathers, writer)
        report(f"{gathers} {count}", [doubles(found), writer.written])
report("mixed", [doubles(some) for some in predict([DataLoader(range(1), 2), DataLoader(range(5), 2)], True)])
trainer.strategy._gathers, trainer.callbacks = True, []
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
    result = run_ranks(SCRIPT, count, timeout=240)
    for samples in (1, 2, 5):
        whole = [[2 * i for i in range(at, min(at + 2, samples))] for at in range(0, samples, 2)]
        own = [list(range(samples))[rank::count] for rank in range(count)]
        batches = [[[2 * i for i in some[at : at + 2]] for at in range(0, len(some), 2)] for some in own]
        written = [[*some, [len(of_rank)] * 2] for some, of_rank in zip(own, batches, strict=True)]
        for gathers, found in {
            "True": [whole] * count,
            "rank 0": [whole] + [None] * (count - 1),
            "False": batches,
        }.items():
            assert result.values(f"{gathers} {samples}") == [list(pair) for pair in zip(found, written, strict=True)]
    assert result.values("mixed") == [[[[0]], [[0, 2], [4, 6], [8]]]] * count
    for samples in (4, 7):
        forward, backward = list(range(0, 2 * samples, 2)), list(range(2 * samples - 2, -1, -2))
        first = [forward[i : i + 2] for i in range(0, samples, 2)]
        second = [backward[i : i + 3] for i in range(0, samples, 3)]
        assert result.values(f"{samples}") == [[first, second]] * count
        assert result.values(f"names {samples}") == [[f"sample {i}" for i in reversed(range(samples))]] * count
        assert result.values(f"boxes {samples}") == [[[[i, i]] * (i % 3) for i in range(samples)]] * count
