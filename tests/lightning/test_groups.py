"""Groups of ranks train at once with `RingStrategy(group=)`, each as one process on the data of its group."""

import pytest

from tests.launch import run_ranks

SCRIPT = """
import os
import sys
import warnings

import torch

import ring_plugins as ring

ring.init(ranks=int(os.environ["TEST_RANKS"]))
import torchmetrics
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.lightning import RingFabricStrategy, RingStrategy
from ring_plugins.lightning.process_group import all_gather
from tests.worker import report

warnings.simplefilter("ignore")


class Model(LightningModule):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        layers = torch.nn.Linear(5, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        self.net, self.error = torch.nn.Sequential(*layers), torchmetrics.MeanAbsoluteError()
        self.batches = []

    def training_step(self, batch, index):
        self.batches.append(batch)
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.error(self.net(x), y)
        self.log("error", self.error)
        self.log("mean", self.net(x).mean(), sync_dist=True)
        self.gathered = self.all_gather(torch.tensor([float(ring.rank())])).flatten().tolist()
        self.summed = self.trainer.strategy.reduce(torch.tensor(float(ring.rank())), reduce_op="sum").item()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Replay:  # the batches of two epochs

    def __init__(self, batches, trainer):
        self.epochs, self.trainer = [batches[:4], batches[4:]], trainer

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(self.epochs[min(self.trainer.current_epoch, 1)])


def data_of(which):
    x = torch.randn(48, 5, generator=torch.Generator().manual_seed(which))
    return TensorDataset(x, x.sum(1, keepdim=True))


def weights_of(model):
    return torch.cat([value.double().flatten() for value in model.state_dict().values()])


def options(directory):
    return dict(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=directory, num_sanity_val_steps=0,
    )


def refusal(call):
    try:
        call()
    except RingError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trained(groups, **strategy):
    which = next(i for i, ranks in enumerate(groups) if ring.rank() in ranks)
    ranks = groups[which]
    group = ring.Group(ranks)
    own_batch = 12 // group.size
    nodes = ring.all_gather_object(ring.node_rank(), group=group)
    directory = os.path.join(os.environ["TEST_DIRECTORY"], "-".join(map(str, ranks)))
    model = Model(which if group.rank == 0 else 7)
    saves = ModelCheckpoint(directory, monitor="error", save_last=True)
    trainer = Trainer(
        strategy=RingStrategy(group=group, drift_check_every=2, **strategy), sync_batchnorm=True,
        callbacks=[saves, EarlyStopping("error")], **options(directory),
    )
    loader = DataLoader(data_of(which), batch_size=own_batch)
    trainer.fit(model, loader, loader)
    alone, by_rank = Model(which), ring.all_gather_object(model.batches, group=group)
    together = [tuple(map(torch.cat, zip(*batches))) for batches in zip(*by_rank)]
    single = Trainer(strategy=SingleDeviceStrategy("cpu"), devices=1, enable_checkpointing=False, **options(directory))
    single.fit(alone, Replay(together, single), DataLoader(data_of(which), batch_size=12))
    seen = torch.cat([x[:, 0] for x, _ in together[:4]])
    own = weights_of(model)
    found = {
        "equal": all(torch.equal(own, other) for other in ring.all_gather_object(own, group=group)),
        "error": float((own - weights_of(alone)).abs().max()),
        "metrics": {
            name: abs(float(trainer.callback_metrics[name] - single.callback_metrics[name]))
            for name in ("loss_epoch", "error", "mean")
        },
        "place": [trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.is_global_zero],
        "expected_place": [
            group.size, group.rank, nodes[: group.rank].count(nodes[group.rank]), group.rank == 0
        ],
        "gathered": sorted(model.gathered), "summed": model.summed, "ranks": sorted(map(float, group.ranks)),
        "all_samples": torch.equal(seen.sort()[0], data_of(which).tensors[0][:, 0].sort()[0]),
        "files": os.path.isfile(saves.best_model_path),
    }
    more = Trainer(strategy=RingStrategy(group=group), **{**options(directory), "max_epochs": 3})
    more.fit(Model(3), loader, ckpt_path=os.path.join(directory, "last.ckpt"))
    found["resumed"] = more.current_epoch
    return found


def fabric(ranks):
    group = ring.Group(ranks)
    fabric = Fabric(strategy=RingFabricStrategy(group=group), accelerator="cpu")
    fabric.launch()
    torch.manual_seed(group.rank)
    model = torch.nn.Linear(3, 1, bias=False)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 1.0))
    before = model.weight.detach().clone()
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(12.0), batch_size=2))
    fabric.backward((model.weight * (1.0 + ring.rank())).sum())
    optimizer.step()
    each = fabric.all_gather(torch.tensor(float(ring.rank()))).tolist()
    seen = torch.cat(list(loader)).tolist()
    step = float((before - model.weight)[0, 0]) - sum(1.0 + rank for rank in ranks) / len(ranks)
    return {"step": step, "samples": seen == [*range(group.rank, 12, group.size)], "each": each == [*group.ranks]}


def alone():
    model, data = Model(ring.rank()), data_of(ring.rank())
    trainer = Trainer(strategy=RingStrategy(group=ring.Group([ring.rank()])), **options(None))
    found = trainer.validate(model, DataLoader(data, batch_size=6), verbose=False)[0]
    x, y = data.tensors
    model.eval()
    with torch.no_grad():
        return abs(found["error"] - float((model.net(x) - y).abs().mean()))


fifth = [4] if ring.size() == 5 else []
ACROSS, BESIDE = [[0, 2], [1, 3, *fifth]], [[0, 1], [*fifth, 3, 2]]
report("across", trained(ACROSS))
report("beside", trained(BESIDE, shard_optimizer=True))
report("alone", alone())
report("fabric", fabric(next(ranks for ranks in ACROSS if ring.rank() in ranks)))
torch.distributed.destroy_process_group()
torch.distributed.init_process_group("ring")  # the script's own, of all ranks
report("own process group", trained(BESIDE))
report("alone, own process group", alone())
shapes = [(2, 3) if rank % 2 else (3, 2) for rank in range(ring.size())]  # of as many elements
report("shapes", [tuple(one.shape) for one in all_gather(torch.ones(shapes[ring.rank()]))] == shapes)
shape = (2,) if ring.rank() % 2 else (2, 1)
report("dimensions", refusal(lambda: all_gather(torch.ones(shape))))
other = ring.Group([0, 3] if ring.rank() in (1, 2) else [1, 2])  # of which this rank is none
report("outside", [refusal(lambda: RingStrategy(group=other)), refusal(lambda: RingFabricStrategy(group=other))])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("started_by", "processes", "nodes"), [("spawned", 4, ""), ("mpirun", 5, "1,2,2")])
def test_groups_train_at_once_as_one_process_each(started_by, processes, nodes, tmp_path):
    hosts = {"RING_VIRTUAL_NODES": nodes} if nodes else {}
    run = run_ranks(SCRIPT, processes, started_by, env={"TEST_DIRECTORY": str(tmp_path), **hosts}, timeout=300)
    for groups in ("across", "beside", "own process group"):
        for found in run.values(groups):
            assert found["equal"] and found["all_samples"] and found["error"] < 1e-5
            assert max(found["metrics"].values()) < 1e-5
            assert found["place"] == found["expected_place"]
            assert found["gathered"] == found["ranks"] and found["summed"] == sum(found["ranks"])
            assert found["files"] and found["resumed"] == 3
    assert max(run.values("alone") + run.values("alone, own process group")) < 1e-5
    for found in run.values("fabric"):
        assert abs(found["step"]) < 1e-5 and found["samples"] and found["each"]
    assert all(run.values("shapes"))
    assert all(text.startswith("MismatchError") and "dimensions" in text for text in run.values("dimensions"))
    for refusals in run.values("outside"):
        assert all(text.startswith("ArgumentError") and "is not in the group of ranks" in text for text in refusals)


FIRST_FIT = """
import lightning
import torch
from torch.utils.data import DataLoader

import ring_plugins as ring
from ring_plugins.lightning import RingStrategy
from tests.worker import report

ring.init(ranks=2)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
strategy = RingStrategy(group=ring.Group([ring.rank()]))
trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", max_epochs=2, **quiet)
trainer.fit(Model(), DataLoader(torch.ones(16, 4), batch_size=2))
report("steps", trainer.global_step)
"""


@pytest.mark.slow
def test_groups_of_one_may_train_first_and_are_not_told_that_they_forgot_to_average():
    assert run_ranks(FIRST_FIT, 2, timeout=120).values("steps") == [16, 16]
