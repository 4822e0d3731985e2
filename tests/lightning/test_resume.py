"""A `fit` that goes on in the middle of an epoch reads what is left of it, and ends as one that was not interrupted."""

import importlib.util
import logging
from collections import Counter

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

import ring_plugins as ring
from ring_plugins.lightning import RingStrategy
from ring_plugins.torch.order import shuffled
from tests.launch import run_ranks


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.seen = torch.nn.Linear(1, 1).double(), []

    def training_step(self, batch, index):
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        if not getattr(self.trainer.strategy, "ran_out", False):
            numbers = [part.flatten().int().tolist() for part in parts]
            self.seen.append([self.trainer.current_epoch, index, *numbers])
        return (self.layer(torch.cat(parts) / 20) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


class Save(Callback):
    """Saves a checkpoint behind a batch of epoch 1."""

    def __init__(self, path, behind):
        self.path, self.behind = path, behind

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if (trainer.current_epoch, index + 1) == (1, self.behind):
            trainer.save_checkpoint(self.path)


def data(count=20):
    return [torch.tensor([float(i)], dtype=torch.float64) for i in range(count)]


def fit(loader, path, behind=0, ranks=1, resumes=False, strategy=None, callbacks=(), **options):
    seed_everything(3, verbose=False)
    model = Model()
    trainer = Trainer(
        strategy=strategy or RingStrategy(), devices=ranks, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=bool(callbacks), max_epochs=3,
        callbacks=[Save(path, behind), *callbacks], **options,
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=path if resumes else None)
    return model.seen, model.layer.weight.item()


@pytest.fixture
def _alone():
    yield
    ring.shutdown()


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(data())


LOADERS = {
    "shuffled": lambda: DataLoader(data(), 2, shuffle=True),
    "two of different length": lambda: CombinedLoader(
        {"a": DataLoader(data(), 2, shuffle=True), "b": DataLoader(data(6), 2)}, "max_size_cycle"
    ),
    "without an order": lambda: DataLoader(Numbers(), 2),
}


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(("kind", "behind"), [*((kind, 9) for kind in LOADERS), ("shuffled", 1)])
def test_it_ends_as_without_an_interruption_and_repeats_batches_behind_the_last_step(tmp_path, kind, behind, caplog):
    # Two batches make a step, so the checkpoint behind the ninth batch of epoch 1 is that of the eighth.
    path = str(tmp_path / "middle.ckpt")
    whole, weight = fit(LOADERS[kind](), path, behind, accumulate_grad_batches=2)
    with caplog.at_level(logging.WARNING, "ring_plugins"):
        rest, resumed = fit(LOADERS[kind](), path, resumes=True, accumulate_grad_batches=2)
    assert rest == whole[10 + behind - 1 :] and resumed == weight
    told = [record.getMessage() for record in caplog.records if "goes on behind 8 batches" in record.getMessage()]
    assert len(told) == (kind == "without an order") and all("a DataLoader of Numbers" in text for text in told)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("before", [2, 3])
def test_a_checkpoint_of_more_ranks_goes_on_at_another_number_so_that_the_epoch_ends_where_all_do(tmp_path, before):
    path = str(tmp_path / "middle.ckpt")
    fit(DataLoader(data(), 2, shuffle=True), path, 3)
    checkpoint = torch.load(path, weights_only=False)
    consumed, order = 3 * 2 * before, shuffled(20, 4)
    position = {"consumed": consumed, "length": 20, "drawn_by": 4, "checksum": 0}
    checkpoint["ring_plugins"] = {"batches": 3, "total": -(-10 // before), "ranks": before, "loaders": [position]}
    torch.save(checkpoint, path)
    rest, _ = fit(DataLoader(data(), 2, shuffle=True), path, resumes=True)
    left = [[1, consumed // 2 + i, order[at : at + 2]] for i, at in enumerate(range(consumed, 20, 2))]
    assert rest[: len(left)] == left and rest[len(left)][:2] == [2, 0] and len(rest) == len(left) + 10


SCRIPT = """
import os
from torch.utils.data import DataLoader
import ring_plugins as ring
from tests.lightning.test_resume import Numbers, data, fit
from tests.worker import report

ranks = int(os.environ["TEST_RANKS"])
ring.init(ranks=ranks)
path, resumes = os.environ["TEST_PATH"], "TEST_RESUMES" in os.environ
loaders = {
    "shuffled": (lambda: DataLoader(data(), 2, shuffle=True), {}),
    "accumulated": (lambda: DataLoader(data(25), 1), {"accumulate_grad_batches": 2}),
    "sampler": (lambda: DataLoader(data(), 2, sampler=list(range(19, -1, -1)), num_workers=1), {}),
    "batches": (lambda: DataLoader(data(), batch_sampler=[[i, i + 1] for i in range(0, 20, 2)]), {}),
    "limited": (lambda: DataLoader(data(), 1, shuffle=True), {"limit_train_batches": 5}),
    "iterable": (lambda: DataLoader(Numbers(), 2), {}),
}
for name, (loader, options) in loaders.items():
    if name != "iterable" or ranks == 2:
        report(name, fit(loader(), f"{path}/{name}", 0 if resumes else 3, ranks, resumes, **options))
"""


@pytest.mark.slow
def test_any_number_of_ranks_goes_on_and_as_many_as_before_end_with_equal_bits(tmp_path):
    env = {"TEST_PATH": str(tmp_path)}
    whole = run_ranks(SCRIPT, 2, env=env, timeout=300)
    for ranks in (2, 3, 1):
        rest = run_ranks(SCRIPT, ranks, env={**env, "TEST_RESUMES": "1"}, timeout=300)
        for name in ("shuffled", "accumulated", "sampler", "batches", "limited", *["iterable"] * (ranks == 2)):
            before, after = whole.values(name), rest.values(name)
            done = 2 if name == "accumulated" else 3
            if ranks == 2:
                assert [[one for one in seen if one[:2] >= [1, done]] for seen, _ in before] == [
                    seen for seen, _ in after
                ]
                assert [weight for _, weight in before] == [weight for _, weight in after]
                continue
            read = [one for seen, _ in before for one in seen if one[0] == 1 and one[1] < done]
            left = [one for seen, _ in after for one in seen if one[0] == 1]
            counted = Counter(number for one in read + left for number in one[2])
            most = ranks - 1 if name in ("shuffled", "limited") else 0  # repeated, as in any epoch of a shuffled loader
            assert counted.total() - len(counted) <= most and len({weight for _, weight in after}) == 1
            length = {"accumulated": 25, "limited": 10}.get(name, 20)
            assert len(counted) == length or (name == "limited" and length <= len(counted) < length + ranks)
            # The epoch ends where all do, so that validation, schedulers and the last step come as always.
            epochs = [[one for one in after[0][0] if one[0] == epoch] for epoch in (1, 2)]
            if name != "accumulated":
                assert epochs[0][-1][1] == epochs[1][-1][1]


OTHERS = """
import os
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, IterableDataset
import ring_plugins as ring
from ring_plugins.lightning.environment import RingEnvironment
from tests.lightning.test_resume import data, fit
from tests.worker import report

ring.init(ranks=2)
path = os.environ["TEST_PATH"]

def ddp():
    return DDPStrategy(cluster_environment=RingEnvironment(), process_group_backend="gloo")

def loader():
    return DataLoader(data(), 2, shuffle=True)

for name, first, second in (("from DDP", ddp, lambda: None), ("to DDP", lambda: None, ddp)):
    report(name, [fit(loader(), f"{path}/{name}", 3, 2, strategy=first()),
                  fit(loader(), f"{path}/{name}", 0, 2, True, strategy=second())])

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    StatefulDataLoader = None

class Own(IterableDataset):
    def __init__(self):
        self.done = 0

    def __iter__(self):
        while self.done < 20:
            self.done += 2
            yield data()[self.done - 2 + ring.rank()]
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]

kinds = {
    "its own": lambda: StatefulDataLoader(Own(), 2),
    "shuffled": lambda: StatefulDataLoader(data(), 2, shuffle=True),
    "in workers": lambda: StatefulDataLoader(data(), 2, num_workers=2),
}
for name, made in kinds.items() if StatefulDataLoader else ():
    report(name, [fit(made(), f"{path}/{name}", 3, 2), fit(made(), f"{path}/{name}", 0, 2, True)])
"""


@pytest.mark.slow
def test_other_strategies_and_loaders_that_keep_their_state_go_on(tmp_path):
    result = run_ranks(OTHERS, 2, env={"TEST_PATH": str(tmp_path)}, timeout=300)
    kinds = ["its own", "shuffled", "in workers"] if importlib.util.find_spec("torchdata") else []
    for name in ("from DDP", *kinds):
        for (whole, weight), (rest, resumed) in result.values(name):
            assert rest == whole[5 + 3 :] and resumed == weight, name
    for (whole, _), (rest, _) in result.values("to DDP"):  # which begins the epoch's data anew
        assert [one[:2] for one in rest] == [one[:2] for one in whole[5 + 3 :]]
        assert [one[2] for one in rest[:2]] == [one[2] for one in whole[5:7]]


KILLED = """
import os, signal
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
import ring_plugins as ring
from tests.lightning.test_resume import data, fit
from tests.worker import report

ring.init(ranks=2)
path, dies, resumes = os.environ["TEST_PATH"], "TEST_DIES" in os.environ, "TEST_RESUMES" in os.environ

class Die(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if (trainer.current_epoch, index) == (1, 3):
            report("ends", True)
            os.kill(os.getpid(), signal.SIGKILL)

callbacks = [ModelCheckpoint(path, save_last=True, every_n_train_steps=2, save_top_k=-1), *[Die()] * dies]
report("fit", fit(DataLoader(data(), 2, shuffle=True), f"{path}/last.ckpt", 0, 2, resumes, callbacks=callbacks))
"""


@pytest.mark.slow
def test_a_job_that_was_killed_as_a_whole_goes_on_from_its_last_checkpoint(tmp_path):
    whole = run_ranks(KILLED, 2, env={"TEST_PATH": str(tmp_path / "whole")}, timeout=120).values("fit")
    env = {"TEST_PATH": str(tmp_path / "killed")}
    killed = run_ranks(KILLED, 2, env={**env, "TEST_DIES": "1"}, timeout=120, check=False)
    assert killed.returncode and killed.values("ends")
    rest = run_ranks(KILLED, 2, env={**env, "TEST_RESUMES": "1"}, timeout=120).values("fit")
    # The last of the checkpoints is that behind step 8, which is the third batch of epoch 1.
    assert rest == [[seen[5 + 3 :], weight] for seen, weight in whole]
