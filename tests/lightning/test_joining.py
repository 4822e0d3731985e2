"""What a process takes over from a Trainer that has begun: it then ends as that one does. Both are in this process."""

import pickle

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader, TensorDataset

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.lightning import RingStrategy
from ring_plugins.lightning.joining import MeetingPoint

EPOCHS, BATCHES = 3, 4


@pytest.fixture(autouse=True)
def _leave_no_world():
    yield
    ring.shutdown()


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def training_step(self, batch, index):
        return (self.weight - batch[0].mean(0)).square().sum()

    def validation_step(self, batch, index):
        self.log("loss", Model.training_step(self, batch, index))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)


class Place(MeetingPoint):
    """Where a Trainer leaves its state as it is before a batch, or takes over another one's before its first."""

    def __init__(self, trainer, before, state):
        self.before, self.state, self.left = before, state, None
        super().__init__(trainer.strategy, trainer)

    def _meet_and_advance(self, fetcher):
        loop = self._trainer.fit_loop
        if self.state is not None:
            state, self.state = pickle.loads(self.state), None
            self._load(state)
            self._load_data(state, fetcher)
        elif (loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready) == self.before:
            self.left = pickle.dumps(self._state())
        self._advance(fetcher)


class Meeting(Callback):
    def __init__(self, before, state=None):
        self.arguments = before, state

    def on_fit_start(self, trainer, module):
        self.place = Place(trainer, *self.arguments)

    def on_fit_end(self, trainer, module):
        self.place.close()


def fit(tmp_path, meeting, model, callbacks=(), **options):
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=RingStrategy(), logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
        callbacks=[meeting, *callbacks],
        **{"max_epochs": EPOCHS, "enable_checkpointing": False, **options},
    )  # fmt: skip
    data = TensorDataset(torch.arange(2.0 * BATCHES).reshape(BATCHES, 2))
    trainer.fit(model, DataLoader(data), DataLoader(data))
    return trainer


def both(tmp_path, before, model=Model, callbacks=tuple, **options):
    """The Trainers of a member and of a process that joins it before a batch, after they have ended alike.

    Args:
        before: epoch and batch.
        model: makes one.
        callbacks: makes those of one Trainer.
        options: of the Trainers.
    """
    meeting = Meeting(before)
    member = fit(tmp_path, meeting, model(), callbacks(), **options)
    joiner = fit(tmp_path, Meeting(before, meeting.place.left), model(), callbacks(), **options)
    weights = [list(trainer.lightning_module.state_dict().values()) for trainer in (member, joiner)]
    assert all(map(torch.equal, *weights))
    assert joiner.global_step == member.global_step
    return member, joiner


def test_it_goes_on_from_any_batch(tmp_path):
    both(tmp_path, (0, 0))
    both(tmp_path, (1, 2))


def test_number_of_batches_that_accumulate_in_this_epoch(tmp_path):
    member, _ = both(tmp_path, (1, 2), callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2})])
    assert member.global_step == BATCHES + 2 * BATCHES // 2


def test_a_callback_that_saves_only_in_an_exception(tmp_path):
    both(tmp_path, (1, 2), callbacks=lambda: [OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)


def test_a_checkpoint_that_waits_for_the_next_validation(tmp_path):
    """It is due in step 3, and nothing was validated yet."""
    saved = both(
        tmp_path, (0, 3), max_epochs=1, enable_checkpointing=True,
        callbacks=lambda: [ModelCheckpoint(monitor="loss", every_n_train_steps=3, save_on_train_epoch_end=False)],
    )  # fmt: skip
    assert all(trainer.checkpoint_callback.best_model_path for trainer in saved)


class Caching(Model):
    """Its buffers have a value for each batch; they are made, grow and go in training steps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("made", None, persistent=False)
        self.register_buffer("grown", torch.ones(1), persistent=False)
        self.register_buffer("filled", torch.zeros(EPOCHS * BATCHES), persistent=False)
        self.register_buffer("gone", torch.ones(1), persistent=False)
        self.part = torch.nn.Identity()

    def training_step(self, batch, index):
        value = torch.full((1,), float(self.global_step))
        self.made = value if self.made is None else torch.cat([self.made, value])
        self.grown, self.gone = torch.cat([self.grown, value]), None
        self.filled[self.global_step] = value
        if "late" not in self.part._buffers:
            self.part.register_buffer("late", torch.zeros(1), persistent=False)
        self.part.late += value
        return super().training_step(batch, index)


def test_buffers_that_are_not_saved_and_not_those_of_the_first_step(tmp_path):
    member, joiner = (dict(one.lightning_module.named_buffers()) for one in both(tmp_path, (1, 2), Caching))
    assert list(member) == ["made", "grown", "filled", "part.late"]
    assert {name: buffer.tolist() for name, buffer in joiner.items()} == {
        name: buffer.tolist() for name, buffer in member.items()
    }


class Scheduled(Model):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.mark.parametrize("model", [Model, Scheduled])
@pytest.mark.parametrize("start", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_stochastic_weight_averaging(tmp_path, model, start, strategy):
    """Which has exchanged the scheduler, or has not yet."""
    trainers = both(
        tmp_path, (1, 2), model, max_epochs=4,
        callbacks=lambda: [StochasticWeightAveraging(0.05, start, 3, annealing_strategy=strategy)],
    )  # fmt: skip
    seen = []
    for trainer in trainers:
        (averaging,) = (one for one in trainer.callbacks if isinstance(one, StochasticWeightAveraging))
        (config,) = trainer.lr_scheduler_configs
        assert config.scheduler is averaging._swa_scheduler
        group = trainer.optimizers[0].param_groups[0]
        seen.append([averaging.n_averaged.item(), averaging._scheduler_state, group["lr"], group["initial_lr"]])
    assert seen[0] == seen[1]


def test_validation_by_the_clock_is_rejected(tmp_path):
    with pytest.raises(ArgumentError, match=r"as a time \(of 300 s\).*Pass a number of batches"):
        fit(tmp_path, Meeting((0, 0)), Model(), val_check_interval="00:00:05:00")
