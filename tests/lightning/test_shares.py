"""Each rank reads its share of the samples, in the loader's order, and evaluations count every sample once."""

import itertools

import pytest

from ring_plugins.lightning.shares import _Even
from tests.launch import run_ranks


@pytest.mark.parametrize(
    ("own", "longest", "expected"),
    [
        ((2, 1), (2, 1), ["a0", "a1", "b0"]),
        ((2, 1), (3, 3), ["a0", "a1", "a1 again", "b0", "b0 again", "b0 again"]),
        ((0, 1), (2, 1), ["a1 again", "a1 again", "b0"]),
        ((2, 0), (2, 1), ["a0", "a1", "b0 again"]),
    ],
)
def test_a_rank_with_fewer_batches_repeats_its_last_one(own, longest, expected):
    repeated = []
    items = iter([("a0", 0, 0), ("a1", 1, 0), ("b0", 0, 1)])
    fetcher = _Even(items, own, longest, lambda repeats, *_: repeated.append(repeats))
    found = []
    while True:
        try:
            batch, _, _ = next(fetcher)
        except StopIteration:
            break
        found.append(batch + " again" * repeated[-1])
    assert found == expected
    assert fetcher.done


SCRIPT = """
import os
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, BatchSampler
from torchmetrics import CatMetric
import ring_plugins as ring
from ring_plugins.lightning import RingStrategy
from tests.worker import report

ranks = int(os.environ["TEST_RANKS"])
ring.init(ranks=ranks)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.trained = torch.nn.Linear(1, 1).double(), CatMetric(), []

    def training_step(self, batch, batch_idx):
        if not self.trainer.strategy.ran_out:
            self.trained += batch.int().flatten().tolist()
        return self.layer(batch).mean()

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.trainer.strategy.reduce(torch.ones(1))  # a collective finds its partners
        self.seen.update(batch.flatten())
        self.log("mean", batch.mean(), sync_dist=True, add_dataloader_idx=False)
        self.log("most", batch.max(), sync_dist=True, reduce_fx="max", add_dataloader_idx=False)

    validation_step = test_step

    def on_test_epoch_end(self):
        self.found = sorted(self.seen.compute().int().flatten().tolist())

    on_validation_epoch_end = on_test_epoch_end

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), 0.1)

def data(count):
    return [torch.tensor([float(i)], dtype=torch.float64) for i in range(count)]

def trainer(**options):
    return Trainer(
        strategy=RingStrategy(), devices=ranks, accelerator="cpu", logger=False, enable_model_summary=False,
        enable_progress_bar=False, enable_checkpointing=False, num_sanity_val_steps=0, max_epochs=1, **options,
    )

for count in (1, 5, 7, 8):
    model = Model()
    result = trainer().test(model, DataLoader(data(count), 2), verbose=False)[0]
    report(f"test {count}", [model.found == list(range(count)), result["mean"] - (count - 1) / 2, result["most"]])
model = Model()
trainer().validate(model, DataLoader(data(7), 2), verbose=False)
report("validate", model.found)

order = [5, 3, 1, 0, 2, 4, 6]
for name, loader in {
    "not shuffled": DataLoader(data(7), 1),
    "sampler": DataLoader(data(7), 1, sampler=order),
    "batch sampler": DataLoader(data(7), batch_sampler=[[5, 3], [1], [0, 2, 4], [6]]),
}.items():
    model = Model()
    trainer().fit(model, loader)
    report(name, model.trained)
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_trainers_count_every_sample_once_and_keep_the_order(count):
    result = run_ranks(SCRIPT, count, timeout=180)
    for samples in (1, 5, 7, 8):
        for is_whole, error, most in result.values(f"test {samples}"):
            assert is_whole
            assert abs(error) <= 1e-7 * max(1, samples / 2)  # Lightning adds in float32
            assert most == samples - 1
    assert result.values("validate") == [list(range(7))] * count
    order = [5, 3, 1, 0, 2, 4, 6]
    assert result.values("not shuffled") == [list(range(7))[rank::count] for rank in range(count)]
    assert result.values("sampler") == [order[rank::count] for rank in range(count)]
    batches = [[5, 3], [1], [0, 2, 4], [6]]
    assert result.values("batch sampler") == [list(itertools.chain(*batches[rank::count])) for rank in range(count)]


TOGETHER = """
import os
import random
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
import ring_plugins as ring
from ring_plugins.lightning import RingStrategy
from tests.worker import report

ranks = int(os.environ["TEST_RANKS"])
ring.init(ranks=ranks)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(1, 1).double()
        self.outputs, self.by_loader, self.count, self.total = [], {"a": []}, 0, torch.zeros(1, dtype=torch.float64)
        self.ran_out, self.steps, self.trained = [], [], []

    def training_step(self, batch, batch_idx):
        self.trained += batch.int().flatten().tolist()
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.trainer.strategy.reduce(torch.ones(1))
        if isinstance(batch, dict):
            return
        self.outputs.append(batch.sum())
        self.by_loader["a"] += batch.flatten().tolist()
        self.count += len(batch)
        self.total += batch.sum()
        self.log("one", 1.0, on_step=True, on_epoch=True, sync_dist=True)

    def on_validation_batch_end(self, *_):
        self.ran_out.append(self.trainer.strategy.ran_out)
        self.steps.append(float(self.trainer.callback_metrics.get("one_step", 1.0)))

    def on_validation_epoch_end(self):
        self.ran_out.append(self.trainer.strategy.ran_out)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def data(count):
    return [torch.tensor([float(i)], dtype=torch.float64) for i in range(count)]

def trainer(**options):
    return Trainer(
        strategy=RingStrategy(), devices=ranks, accelerator="cpu", logger=False, enable_model_summary=False,
        enable_progress_bar=False, enable_checkpointing=False, num_sanity_val_steps=0, max_epochs=1, **options,
    )

model = Model()
trainer().validate(model, DataLoader(data(5), 2), verbose=False)
rank = ring.rank()
own = [float(i) for i in range(rank, 5, ranks)]
report("collected", [sum(model.outputs) == sum(own), model.by_loader["a"] == own, model.count == len(own),
                     model.total.item() == sum(own), model.steps == [1.0, 1.0]])
report("ran out", model.ran_out)
together = CombinedLoader({"a": DataLoader(data(5), 2), "b": DataLoader(data(3), 2)}, "max_size_cycle")
trainer().validate(Model(), together, verbose=False)
trainer().validate(Model(), DataLoader(data(5), 3, drop_last=True), verbose=False)

class Own(BatchSampler):
    pass

class Loader(DataLoader):
    def __init__(self, dataset, extra, **options):
        super().__init__(dataset, **options)
        self.extra = extra

mine = DistributedSampler(range(8), ranks, rank, shuffle=False)
for name, loader in {
    "divides itself": DataLoader(data(8), batch_sampler=Own(mine, 2, False)),
    "torch's": DataLoader(data(8), batch_sampler=BatchSampler(mine, 2, False)),
    "order": DataLoader(data(8), batch_sampler=BatchSampler(list(range(7, -1, -1)), 2, False)),
    "other arguments": Loader(data(8), 3, batch_sampler=[[0, 1], [2, 3], [4, 5], [6, 7]]),
}.items():
    model = Model()
    trainer().fit(model, loader)
    report(name, model.trained)
model = Model()
trainer().fit(model, DataLoader(data(1), 2))  # fewer samples than ranks
reference = Model()
reference.layer(data(1)[0]).mean().backward()
expected = [(one - 0.1 * one.grad).item() for one in reference.layer.parameters()]
report("few", [one.item() for one in model.layer.parameters()] == expected)

class Shuffled(list):
    def __iter__(self):
        random.Random(rank).shuffle(self)
        return super().__iter__()

for kind in ("fit", "validate"):
    try:
        getattr(trainer(), kind)(Model(), DataLoader(data(32), 2, sampler=Shuffled(range(32))))
    except ring.MismatchError as error:
        report(kind, str(error))
"""


@pytest.mark.slow
def test_what_ranks_read_together_is_right_or_told():
    result = run_ranks(TOGETHER, 2, timeout=240)
    assert result.values("collected") == [[True] * 5] * 2
    assert result.values("ran out") == [[False, False, False], [False, True, False]]
    for name in ("divides itself", "torch's"):
        assert result.values(name) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert result.values("order") == [[7, 6, 3, 2], [5, 4, 1, 0]]
    assert result.values("other arguments") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert result.values("few") == [True, True]
    for kind in ("fit", "validate"):
        for text in result.values(kind):
            assert "rank 0 and rank 1 have drawn different samples" in text
            assert "seed a generator" in text


METRICS = """
import os
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError
from torchmetrics.classification import MulticlassF1Score
import ring_plugins as ring
from ring_plugins.lightning import RingStrategy
from tests.worker import report

torch.set_default_dtype(torch.float64)  # in which Lightning adds what is logged, too
ranks = int(os.environ["TEST_RANKS"])
ring.init(ranks=ranks)
x, y = torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(0))

def metrics():
    return torch.nn.ModuleDict({"error": MeanSquaredError(), "mean": MeanMetric(),
                                "f1": MulticlassF1Score(num_classes=3, average="macro")})

def update(found, x, y):
    found["error"].update(x, y)
    found["mean"].update((x * y).sum(1))
    found["f1"].update(x, y.argmax(1))

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.metrics = metrics()

    def test_step(self, batch, batch_idx):
        update(self.metrics, *batch)
        self.log_dict(dict(self.metrics))
        self.log("logged", (batch[0] - batch[1]).square().mean(), sync_dist=True)

    validation_step = test_step

for count in (1, 2, 7, 11):
    alone = metrics().requires_grad_(False)
    update(alone, x[:count], y[:count])
    expected = {name: float(one.compute()) for name, one in alone.items()}
    expected["logged"] = expected["error"]
    for kind in ("test", "validate"):
        trainer = Trainer(
            strategy=RingStrategy(), devices=ranks, accelerator="cpu", logger=False, enable_model_summary=False,
            enable_progress_bar=False, enable_checkpointing=False,
        )
        found = getattr(trainer, kind)(Model(), DataLoader(TensorDataset(x[:count], y[:count]), 2), verbose=False)[0]
        report(f"{kind} {count}", {name: found[name] - one for name, one in expected.items()})
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_metrics_are_those_of_one_process(count):
    result = run_ranks(METRICS, count, timeout=240)
    for samples in (1, 2, 7, 11):
        for kind in ("test", "validate"):
            for errors in result.values(f"{kind} {samples}"):
                assert max(map(abs, errors.values())) < 1e-7, (kind, samples, errors)
