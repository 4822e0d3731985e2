"""What a step that all ranks take together rejects; what it computes is in scenarios.py."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from torch.optim import LBFGS, SGD

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.lightning import RingStrategy
from ring_plugins.lightning.shared_step import SharedStep, reads_loss


@pytest.fixture(autouse=True)
def _leave_no_world():
    yield
    ring.shutdown()


def fit(model, **arguments):
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=RingStrategy(**arguments), max_epochs=1, limit_train_batches=3,
        limit_val_batches=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(model)


class Searching(BoringModel):
    def configure_optimizers(self):
        return LBFGS(self.parameters(), lr=0.1)


@pytest.mark.parametrize("wrong", ["MemoryError", (MemoryError, 3), 7])
def test_only_exceptions_can_be_skipped(wrong):
    with pytest.raises(ArgumentError, match=r"skip_step_on=.* needs an exception"):
        RingStrategy(skip_step_on=wrong)


def test_steps_of_manual_optimization_cannot_be_skipped():
    with pytest.raises(ArgumentError, match="skip_step_on needs automatic optimization"):
        fit(ManualOptimBoringModel(), skip_step_on=MemoryError)


def test_steps_of_an_optimizer_that_evaluates_several_times_cannot_be_skipped():
    with pytest.raises(ArgumentError, match="LBFGS evaluates its closure several times"):
        fit(Searching(), skip_step_on=MemoryError)


def test_an_optimizer_that_evaluates_several_times_is_rejected_with_accumulation():
    class Averager:
        steps = 0

        def average_loss(self, loss):
            return loss

        def closure(self):
            self.steps += 1
            return weight.square().sum().detach()

    averager, weight = Averager(), torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = LBFGS([weight])
    SharedStep(averager, True, lambda: False, ()).run(optimizer, averager.closure, optimizer.step)
    with pytest.raises(ArgumentError, match="LBFGS evaluates its closure several times.*accumulate_grad_batches=1"):
        SharedStep(averager, True, lambda: True, ()).run(optimizer, averager.closure, optimizer.step)


def test_only_optimizers_that_may_read_the_loss_cost_an_average_of_it():
    class Own(SGD):
        pass

    weights = [torch.nn.Parameter(torch.ones(2))]
    assert not reads_loss(SGD(weights, 0.1))
    assert reads_loss(Own(weights, 0.1))
    assert reads_loss(LBFGS(weights))
