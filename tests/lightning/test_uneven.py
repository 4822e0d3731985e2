"""Ranks with different numbers of batches train to the end of the longest, as one process on all batches."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchmetrics import SumMetric

from ring_plugins.lightning.uneven import Told, kept, weights_of
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
