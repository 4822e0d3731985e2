"""Training with RingStrategy gives what DDP gives, and every rank the same bits; on GPUs (a stand-in for them), too."""

from functools import cache
from pathlib import Path

import lightning.pytorch
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.demos.boring_classes import BoringModel

import ring_plugins.lightning
from ring_plugins.core.base.errors import ArgumentError
from tests.launch import Result, run_ranks
from tests.lightning.scenarios import SCENARIOS

WORKER = Path(__file__).with_name("equality_worker.py")


@cache
def equality(size: int, slow: bool) -> Result:
    """One launch per world size, from which every scenario reports."""
    return run_ranks(WORKER, size, env={"TEST_SLOW": "1" if slow else ""}, timeout=200)


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=[pytest.mark.slow] * (entry.slow or size != 2))
        for size in (1, 2, 3)
        for name, entry in SCENARIOS.items()
        if size in entry.ranks
    ],
)
def test_scenario(size: int, name: str) -> None:
    entry = SCENARIOS[name]
    found = equality(size, entry.slow).values(name)
    assert len(found) == size
    for rank, comparison in enumerate(found):
        assert "error" not in comparison, comparison["error"]
        assert comparison["compared"] > 0
        assert comparison["missing"] == []
        assert comparison["disagreements"] == [], f"rank {rank} differs from others"
        tolerance = 0.0 if entry.exact and entry.same_as_ddp and size < 3 else TOLERANCE.get(name, 1e-5)
        too_large = {key: value for key, value in comparison["differences"].items() if not value <= tolerance}
        assert too_large == {}


SHARDED = (
    "adam_scheduler_accumulation",
    "clipping_by_norm",
    "clipping_by_value",
    "precision_16_mixed_with_scaler",
    "precision_64_true",
    "two_optimizers_by_hand",
    "toggle_model_sync_grad",
    "unused_parameters",
    "checkpoint_and_early_stopping",
    "resume_mid_training",
    "weight_averaging",
    "finetuning",
    "several_trainers_in_one_process",
)


@cache
def equality_of_sharded_optimizers(size: int) -> Result:
    env = {"TEST_SHARD": "1", "TEST_ONLY": ",".join(SHARDED), "TEST_SLOW": ""}
    return run_ranks(WORKER, size, env=env, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in (2, 3) for name in SHARDED if size in SCENARIOS[name].ranks]
)
def test_scenario_with_sharded_optimizers(size: int, name: str) -> None:
    found = equality_of_sharded_optimizers(size).values(name)
    assert len(found) == size
    for comparison in found:
        assert "error" not in comparison, comparison["error"]
        assert comparison["compared"] > 0
        assert comparison["missing"] == comparison["disagreements"] == []
        tolerance = max(TOLERANCE.get(name, 1e-5), 1e-6)
        assert all(value <= tolerance for value in comparison["differences"].values()), comparison["differences"]


# One bfloat16 unit in the last place of values near 1.
TOLERANCE = {"precision_bf16_true": 1.6e-2, "resume_mid_training": 0.0, "steps_that_one_rank_cannot_compute": 1e-4}


def test_ranks_have_a_process_group() -> None:
    assert equality(2, False).values("backend") == ["ring", "ring"]


def test_a_world_of_one_has_no_process_group():
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    trainer = lightning.pytorch.Trainer(
        strategy=ring_plugins.lightning.RingStrategy(), devices=1, accelerator="cpu", fast_dev_run=True, **quiet
    )
    model, backends = BoringModel(), []
    model.on_train_start = lambda: backends.append(trainer.strategy.process_group_backend)
    trainer.fit(model)
    assert backends == [None]
    assert trainer.global_step == 1


def test_alone_it_is_a_single_device():
    strategy = lightning.pytorch.Trainer(strategy="ring", devices=1, accelerator="cpu", logger=False).strategy
    assert strategy.launcher is None
    assert not strategy.is_distributed
    assert strategy.waited_seconds == 0.0
    tensor = torch.ones(2)
    assert strategy.reduce(tensor) is tensor
    assert strategy.all_gather(tensor) is tensor


def test_a_gpu_that_is_not_there_is_rejected_as_lightning_does():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(MisconfigurationException, match="No supported gpu backend found"):
        lightning.pytorch.Trainer(strategy="ring", accelerator="gpu", devices=2)


@pytest.mark.parametrize("name", ["BalanceMonitor", "RingEnvironment", "RingFabricStrategy", "RingStrategy"])
def test_arguments_that_do_not_exist_are_errors_of_ours(name):
    with pytest.raises(ArgumentError, match=rf"{name}\(\): too many positional arguments. It takes "):
        getattr(ring_plugins.lightning, name)(*range(9))
