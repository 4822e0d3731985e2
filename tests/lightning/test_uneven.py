"""Ranks with different numbers of batches train to the end of the longest, as one process on all batches."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchmetrics import SumMetric

from ring_plugins.lightning.uneven import Told, UnevenData, kept, weights_of
from tests.launch import run_ranks

NONE, LAST, FULL = Told(False, True, False, 0), Told(True, True, False, 3), Told(True, False, False, 32)


@pytest.mark.parametrize("told", [NONE, LAST, FULL, Told(False, True, True, 0)])
def test_what_a_rank_tells_of_its_batch_is_one_number(told):
    assert Told.unpacked(told.packed()) == told
    assert 0 <= told.packed() < 1 << 31


@pytest.mark.parametrize(
    ("told", "weights"),
    [
        ([FULL, FULL], [1, 1]),
        ([FULL, NONE], [2, 0]),
        ([FULL, LAST, NONE], [3 * 32 / 35, 3 * 3 / 35, 0]),
        ([FULL, LAST._replace(samples=0), NONE], [1.5, 1.5, 0]),  # where one does not know, ranks weigh alike
        ([LAST._replace(samples=0)] * 2, [1, 1]),
    ],
)
def test_losses_weigh_samples_alike(told, weights):
    assert weights_of(told) == pytest.approx(weights)


def test_a_step_that_does_not_count_leaves_metrics_and_buffers():
    module = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "count": SumMetric()})
    module["count"].update(3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with kept(module):
        module["norm"](torch.randn(8, 2))
        module["count"].update(5)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module["count"].compute() == 3


def test_backward_may_need_buffers_and_attributes_of_a_step_that_does_not_count():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    module.register_buffer("seen", torch.zeros(2))
    module.factor, module.outputs, module.sums = torch.ones(2), [1], {"a": [torch.ones(1)], "b": torch.zeros(1)}
    outputs = module.outputs
    with kept(module):
        module.seen += 1
        module.factor += 1
        module.outputs.append(2)
        module.sums["a"].append(3)
        module.sums["b"] += 1
        loss = (module(torch.randn(4, 2)) * module.seen * module.factor * module.sums["b"]).sum()
    loss.backward()
    assert module.outputs is outputs
    assert module.outputs == [1]
    assert str(module.sums) == str({"a": [torch.ones(1)], "b": torch.zeros(1)})
    assert module.factor.tolist() == [1, 1]
    assert module.seen.tolist() == [0, 0]
    assert module[0].running_mean.tolist() == [0, 0]
    with torch.inference_mode(), kept(module):
        module.factor += 1
        module.seen += 1
    assert module.factor.tolist() == [1, 1]
    assert not module.seen.is_inference()
    (module.seen * nn.Parameter(torch.ones(2))).sum().backward()


@pytest.mark.parametrize("shape", [(1, 8, 3), (8, 3), (5, 2)])
def test_a_batch_has_as_many_samples_as_the_loader_draws_whatever_its_tensors_shape(shape):
    data = UnevenData.__new__(UnevenData)
    data._full, data._drawn = 8, 19
    assert [data._samples_of(torch.zeros(shape), number) for number in range(3)] == [8, 8, 3]
    data._drawn = None
    batch = {"x": torch.zeros(shape), "y": torch.zeros(8)}  # of a stream: tensors have to agree
    assert data._samples_of(batch, 0) == (8 if shape[0] == 8 else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("plain", 3),
        ("stream", 2),
        ("accumulate", 3),
        ("manual", 2),
        ("clip", 2),
        ("norm", 2),
        ("shard", 2),
        ("zero", 3),
        ("continue", 2),
        ("accumulate+shard+clip", 3),
        ("accumulate+norm+tensors", 2),
        ("zero+norm+stream", 3),
    ],
)
def test_weights_logs_and_metrics_are_those_of_one_process(case, count):
    worker = Path(__file__).with_name("uneven_worker.py").read_text()
    result = run_ranks(worker, count, env={"TEST_CASE": case}, timeout=120)
    assert len(result.values("error")) == count
    assert max(result.values("error")) < 1e-7
    assert all(result.values("equal"))
    assert max(result.values("losses")) < 1e-12
    assert result.values("seen") == result.values("samples")
    assert result.values("most") == [4.0] * count
    assert all(steps >= 1 for steps, _ in result.values("steps"))


INTERVALS = """
import os
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
import ring_plugins as ring
from ring_plugins.lightning import RingStrategy
from tests.worker import report

ranks = int(os.environ["TEST_RANKS"])
ring.init(ranks=ranks)

class Model(LightningModule):
    def __init__(self, calls_backward=False):
        super().__init__()
        self.layer, self.validated = torch.nn.Linear(1, 1), []
        self.automatic_optimization = not calls_backward

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.trainer.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def fit(model, *counts, interval=1.0):
    loader = DataLoader([torch.ones(1) for _ in range(counts[ring.rank()])], 2)
    trainer = Trainer(
        strategy=RingStrategy(), devices=ranks, accelerator="cpu", logger=False, enable_model_summary=False,
        enable_progress_bar=False, enable_checkpointing=False, num_sanity_val_steps=0, max_epochs=1,
        use_distributed_sampler=False, val_check_interval=interval,
    )
    trainer.fit(model, loader, DataLoader([torch.ones(1)], 1))
    return model.validated

for counts in ((8, 2), (2, 8), (8, 0)):
    report(str(counts), fit(Model(), *counts, interval=3))
fit(Model(True), 8, 8)
for interval, calls_backward in ((5, False), (1.0, True)):
    try:
        fit(Model(calls_backward), 8, 3, interval=interval)
    except ValueError as error:
        report(str(interval), str(error))
"""


@pytest.mark.slow
def test_intervals_between_validations_are_those_of_the_longest_rank_and_own_calls_of_backward_are_told():
    result = run_ranks(INTERVALS, 2, timeout=180)
    for counts in ((8, 2), (2, 8), (8, 0)):
        assert result.values(str(counts)) == [[3], [3]]
    assert ["must be less than or equal to the number" in text for text in result.values("5")] == [True, True]
    assert ["self.manual_backward(loss)" in text for text in result.values("1.0")] == [True, True]


KILLED = """
import os, signal
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
import ring_plugins as ring
from ring_plugins.lightning import RingStrategy
from tests.worker import report

ring.init(ranks=3, on_failure="continue")
rank, victim = ring.rank(), int(os.environ["TEST_VICTIM"])

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.trained = torch.nn.Linear(1, 1), 0

    def training_step(self, batch, batch_idx):
        if rank == victim and self.current_epoch == 0 and self.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        self.trained += not self.trainer.strategy.ran_out
        self.log("loss", batch.mean(), sync_dist=True)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)

torch.manual_seed(rank)
loader = DataLoader(torch.randn(2 * (8, 6, 2)[rank], 1), 2)
trainer = Trainer(
    strategy=RingStrategy(on_failure="continue"), devices=3, accelerator="cpu", logger=False, max_epochs=2,
    enable_model_summary=False, enable_progress_bar=False, enable_checkpointing=False, use_distributed_sampler=False,
)
model = Model()
trainer.fit(model, loader)
report("trained", [model.trained, trainer.global_step, trainer.current_epoch])
report("weights", [p.flatten().tolist() for p in model.parameters()])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "trained"), [(1, [16, 4]), (2, [16, 12]), (0, [12, 4])])
def test_a_rank_is_lost_while_another_has_run_out(victim, trained):
    result = run_ranks(KILLED, 3, env={"TEST_VICTIM": str(victim)}, timeout=180, check=False)
    found = [report for rank, report in sorted(result.reports.items()) if "trained" in report]
    assert [one["trained"][0] for one in found] == trained
    assert found[0]["weights"] == found[1]["weights"] and found[0]["trained"][1:] == found[1]["trained"][1:]
