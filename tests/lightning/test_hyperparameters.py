"""Hyperparameters that differ between ranks are named when fit starts; what a rank has for itself is not."""

import argparse
import dataclasses
import enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule

from ring_plugins.core.base.errors import MismatchError
from ring_plugins.lightning import hyperparameters
from tests.launch import run_ranks


class Kind(enum.Enum):
    A, B = 1, 2


@dataclasses.dataclass
class Config:
    depth: int = 2
    where: str = "/data"


class Module(LightningModule):
    def __init__(self, decay=0.1, rank=0, seed=0, data_dir="x", config=None, kernel=None, schedule=(1, 2), **more):
        super().__init__()
        self.save_hyperparameters()
        self.decay = decay
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(more.get("dropout", 0.1)))


def ranks(monkeypatch, *trainers):
    """Compare as the first of these ranks; the others' objects are made up from their trainers."""
    monkeypatch.setattr(hyperparameters, "is_check_wanted", lambda: True)
    calls = iter([lambda trainer: str(dict(hyperparameters._found(trainer))),
                  lambda trainer: dict(hyperparameters._found(trainer))])  # fmt: skip
    communicator = SimpleNamespace(all_gather_object=lambda *_: [*map(next(calls), trainers)])
    monkeypatch.setattr(hyperparameters, "communicator_of", lambda _: communicator)
    hyperparameters.check_equal(trainers[0])


def trainer(data=None, clip=None, **arguments):
    return SimpleNamespace(
        lightning_module=Module(**arguments), datamodule=data, gradient_clip_val=clip, is_global_zero=True
    )


def data(**arguments):
    class Data(LightningDataModule):
        def __init__(self, batch_size=8, num_workers=0):
            super().__init__()
            self.save_hyperparameters()

    return Data(**arguments)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"decay": 0.25}, {"decay": 0.5}, "hparams.decay is 0.25 and 0.5"),
        ({"dropout": 0.25}, {"dropout": 0.5}, "layers.1.p is 0.25 and 0.5"),
        ({"optimizer": "adam"}, {"optimizer": "sgd"}, "hparams.optimizer is 'adam' and 'sgd'"),
        ({"schedule": [1, 2]}, {"schedule": [1, 3]}, r"hparams.schedule is \(1, 2\) and \(1, 3\)"),
        ({"config": {"a": {"b-c": 1}}}, {"config": {"a": {"b-c": 2}}}, r"hparams.config.a\['b-c'\] is 1 and 2"),
        ({"config": Config()}, {"config": Config(3)}, "hparams.config.depth is 2 and 3"),
        ({"config": argparse.Namespace(x=True)}, {"config": argparse.Namespace(x=False)}, "config.x is True and False"),
        ({"decay": np.float32(0.5)}, {"decay": np.float32(0.25)}, "hparams.decay is 0.5 and 0.25"),
        ({"decay": None}, {"decay": 0.5}, "hparams.decay is None and 0.5"),
        ({"clip": 1.0}, {"clip": None}, r"Trainer\(gradient_clip_val\) is 1.0 and None"),
        ({"loss_name": "l1"}, {"loss_name": "mse"}, "hparams.loss_name is 'l1' and 'mse'"),
        ({"loss": "kl/forward"}, {"loss": "kl/reverse"}, "hparams.loss is 'kl/forward' and 'kl/reverse'"),
        ({"time_dropout": 0.25}, {"time_dropout": 0.5}, "hparams.time_dropout is 0.25 and 0.5"),
        ({"log_l1": -1.0}, {"log_l1": -3.0}, "hparams.log_l1 is -1.0 and -3.0"),
        ({"lora_rank": 4}, {"lora_rank": 8}, "hparams.lora_rank is 4 and 8"),
        ({"blocks": [{"p": 0.0}]}, {"blocks": [{"p": 0.5}]}, r"hparams.blocks\[0\].p is 0.0 and 0.5"),
        ({"blocks": {0: 0.0, 1: 0}}, {"blocks": {0: 0.5, 1: 0}}, r"hparams.blocks\[0\] is 0.0 and 0.5"),
        ({"kind": Kind.A}, {"kind": Kind.B}, "hparams.kind is Kind.A and Kind.B"),
        ({"f": torch.relu}, {"f": torch.tanh}, "hparams.f is .*relu and .*tanh"),
        ({}, {"l1": 0.5}, "hparams.l1 is missing and 0.5"),
        ({"data": data(batch_size=8)}, {"data": data(batch_size=4)}, "datamodule.hparams.batch_size is 8 and 4"),
    ],
)
def test_a_difference_is_named_with_both_values(monkeypatch, first, second, named):
    with pytest.raises(MismatchError, match=f"rank 0 and rank 2 have different hyperparameters: .*{named}") as caught:
        ranks(monkeypatch, trainer(**first), trainer(**first), trainer(**second))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "differing",
    [
        {"num_samples": [10, 12]}, {"data_seed": [1, 2]}, {"experiment_name": ["a", "b"]}, {"offset": [0, 8]},
        {"rank": [0, 1]}, {"seed": [1, 2]}, {"data_dir": ["a", "b"]}, {"localRank": [0, 1]}, {"model_path": ["a", "b"]},
        {"weights": ["/a/0.pt", "/a/1.pt"]}, {"config": [Config(where="/a"), Config(where="/b")]},
        {"kernel": [torch.zeros(2), torch.ones(2)]}, {"kernel": [lambda: 1, lambda: 2]},
        {"kernel": [object(), object()]},
        {"decay": [float("nan"), float("nan")]}, {"decay": [np.float64(0.1), 0.1]}, {"schedule": [(1, 2), [1, 2]]},
        {"data": [data(num_workers=2), data(num_workers=4)]}, {"extra": [1, torch.ones(1)]},
    ],
)  # fmt: skip
def test_what_each_rank_may_have_for_itself_is_not(monkeypatch, differing):
    ((name, values),) = differing.items()
    ranks(monkeypatch, *(trainer(**{name: value}) for value in values))


def test_strings_that_choose_nothing_are_warned_of_and_each_difference_is_named_once(monkeypatch):
    warnings = []
    monkeypatch.setattr(hyperparameters.logger, "warning", warnings.append)
    first, second = trainer(experiment="run_05"), trainer(experiment="run_06")
    ranks(monkeypatch, first, second)
    assert warnings == ["rank 0 and rank 1 have different values: hparams.experiment is 'run_05' and 'run_06'."]
    with pytest.raises(MismatchError) as caught:
        ranks(monkeypatch, trainer(decay=0.25), trainer(decay=0.5))
    assert str(caught.value).count("0.25") == 1


def test_long_values_and_many_of_them_are_cut(monkeypatch):
    one, two = ({f"x{i}": [i] * 1000 + [last] for i in range(20)} for last in (1, 2))
    with pytest.raises(MismatchError, match="and 16 more") as caught:
        ranks(monkeypatch, trainer(**one), trainer(**two))
    assert len(str(caught.value)) < 1500


SEARCH = """
import random
import torch, lightning
from lightning.pytorch.demos.boring_classes import BoringModel
import ring_plugins as ring
from ring_plugins.lightning import RingStrategy
from tests.worker import report

class Model(BoringModel):
    def __init__(self, decay):
        super().__init__()
        self.decay = decay

ring.init(ranks=2)
options = dict(accelerator="cpu", max_epochs=1, limit_train_batches=2, limit_val_batches=0, logger=False)
options |= dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
drawn = 0.25 * (1 + ring.rank())  # as if each rank drew its own
agreed = ring.broadcast_object(drawn)  # after a fit that failed, the next one begins a new job
try:
    lightning.Trainer(strategy=RingStrategy(), **options).fit(Model(drawn))
except ring.MismatchError as error:
    report("error", str(error))
lightning.Trainer(strategy=RingStrategy(), **options).fit(Model(agreed))
report("trained", True)
"""


@pytest.mark.slow
def test_a_search_in_which_each_rank_draws_its_own_is_stopped_and_the_remedy_works():
    result = run_ranks(SEARCH, 2, "spawned", timeout=120)
    assert ["Model.decay is 0.25 and 0.5" in error for error in result.values("error")] == [True, True]
    assert result.values("trained") == [True, True]
