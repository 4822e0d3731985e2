"""`RingStrategy(global_batch_size=...)`: weights, losses and counts are those of one process on any number of ranks."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.lightning import RingFabricStrategy, RingStrategy
from tests.launch import run_ranks

CHECKS = Path(__file__).with_name("checks_global_batch.py")


class Model(LightningModule):
    def __init__(self, automatic=True):
        super().__init__()
        torch.manual_seed(3)
        self.net, self.automatic_optimization = torch.nn.Linear(4, 1), automatic
        self.sizes, self.clears, self.outputs, self.first = [], 0, [], []

    def training_step(self, batch, index):
        self.sizes.append(len(batch[0]))
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_zero_grad(self, _):
        self.clears += 1

    def on_train_batch_end(self, outputs, batch, index):
        self.outputs.append([index, outputs["loss"].item(), self.trainer.callback_metrics["loss_step"].item()])
        self.first.append(batch[0])

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches < 13
        return torch.optim.SGD(self.parameters(), 0.1)


def data():
    return TensorDataset(torch.randn(22, 4, generator=torch.Generator().manual_seed(5)))


def fit(model, loader, ckpt_path=None, options=None, **arguments):
    options = {"max_epochs": 2, **(options or {})}
    trainer = Trainer(
        strategy=RingStrategy(**arguments), accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("exact", [False, True])
def test_on_one_rank_a_step_is_one_batch_to_lightning_and_is_that_of_the_whole_batch(exact):
    model, expected = Model(), Model()
    trainer = fit(model, DataLoader(data(), 4), global_batch_size=8, exact=exact)
    loader = trainer.train_dataloader
    assert loader.num_workers == 0 and loader.drop_last is False and not hasattr(loader, "state_dict")
    assert trainer.global_step == 6 and trainer.num_training_batches == 3 and trainer.current_epoch == 2
    assert sorted(model.sizes) == [2, 2, *[4] * 10] and model.clears == 6
    (x,), losses = data()[:], []
    optimizer = torch.optim.SGD(expected.parameters(), 0.1)
    for first in (0, 8, 16) * 2:
        optimizer.zero_grad()
        loss = expected.net(x[first : first + 8]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other)
    assert [one[0] for one in model.outputs] == [0, 1, 2] * 2
    assert [one[1] for one in model.outputs] == pytest.approx(losses)
    assert [one[2] for one in model.outputs] == pytest.approx(losses)
    epoch = (losses[3] * 8 + losses[4] * 8 + losses[5] * 6) / 22
    assert trainer.callback_metrics["loss_epoch"].item() == pytest.approx(epoch)


class Saves(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 4:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/4.ckpt")


def test_a_fit_goes_on_in_the_middle_of_an_epoch(tmp_path):
    whole, rest = Model(), Model()
    options = {"callbacks": [Saves()], "default_root_dir": tmp_path}
    fit(whole, DataLoader(data(), 4, shuffle=True), options=options, global_batch_size=8)
    trainer = fit(rest, DataLoader(data(), 4, shuffle=True), tmp_path / "4.ckpt", global_batch_size=8)
    assert trainer.global_step == 6 and [one[0] for one in rest.outputs] == [1, 2]
    for own, other in zip(rest.parameters(), whole.parameters(), strict=True):
        assert torch.equal(own, other)
    for batch_size, size, steps in ((2, 8, 2), (2, 4, 4), (7, 14, 1)):  # behind the first 8 of 22 samples
        other = Model()
        fit(other, DataLoader(data(), batch_size, shuffle=True), tmp_path / "4.ckpt", global_batch_size=size)
        assert len(other.outputs) == steps and sum(other.sizes) == 14
        first = other.first[0][:4]
        assert torch.equal(first, whole.first[4][: len(first)])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_of_torchdata_is_divided_as_torchs(tmp_path, shuffle):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    expected, whole, rest = Model(), Model(), Model()
    fit(expected, DataLoader(data(), 4, shuffle=shuffle), global_batch_size=8)
    options = {"callbacks": [Saves()], "default_root_dir": tmp_path}
    fit(whole, torchdata.StatefulDataLoader(data(), 4, shuffle=shuffle), options=options, global_batch_size=8)
    fit(rest, torchdata.StatefulDataLoader(data(), 4, shuffle=shuffle), tmp_path / "4.ckpt", global_batch_size=8)
    assert [one[0] for one in rest.outputs] == [1, 2]
    for model in (whole, rest):
        for own, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(own, other)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(8, 4))


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (DataLoader(data(), 3), "global_batch_size=8 on rank 0 is no multiple of the loader's batch_size=3"),
        (DataLoader(Endless(), 4), "global_batch_size=8 on rank 0 with a Endless, an IterableDataset"),
        (torch.ones(4, 4), "loader=Tensor on rank 0 is not a torch DataLoader"),
        (DataLoader(data(), batch_sampler=[[1], [2, 3]]), "has a batch sampler of its own"),
        (DataLoader(data(), 4, sampler=DistributedSampler(data(), 1, 0)), "has a DistributedSampler, which divides"),
        ([DataLoader(data(), 4), DataLoader(data(), 4)], "on rank 0 with 2 training loaders"),
    ],
)
def test_a_loader_that_cannot_be_divided_is_rejected(loader, says):
    model = Model()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ArgumentError, match=says):
        fit(model, loader, global_batch_size=8)


def test_what_also_says_how_many_batches_a_step_has_is_rejected():
    with pytest.raises(ArgumentError, match=r"accumulate_grad_batches=2\) and global_batch_size=8 on rank 0 both say"):
        fit(Model(), DataLoader(data(), 4), options={"accumulate_grad_batches": 2}, global_batch_size=8)
    with pytest.raises(ArgumentError, match="global_batch_size=8 on rank 0 needs automatic optimization"):
        fit(Model(automatic=False), DataLoader(data(), 4), global_batch_size=8)
    with pytest.raises(ArgumentError, match="sync_batchnorm=True"):
        fit(Model(), DataLoader(data(), 4), options={"sync_batchnorm": True}, global_batch_size=8)
    for size in (0, 2.0, True):
        with pytest.raises(ArgumentError, match="is not a positive number of samples"):
            RingStrategy(global_batch_size=size)
    with pytest.raises(ArgumentError, match=r"exact=True\) needs global_batch_size"):
        RingStrategy(exact=True)
    with pytest.raises(ArgumentError, match=r"compression='fp16'\) has no effect with exact=True"):
        RingStrategy(global_batch_size=8, exact=True, compression="fp16")
    for name, value in (("sync_every", 4), ("skip_step_on", RuntimeError)):
        with pytest.raises(ArgumentError, match=rf"{name}=.* does not work with global_batch_size=8"):
            RingStrategy(global_batch_size=8, **{name: value})
    with pytest.raises(ArgumentError, match=r"fabric.strategy.global_batches\(loader, model, global_batch_size=64\)"):
        RingFabricStrategy(global_batch_size=8)


def test_an_optimizer_that_evaluates_its_closure_several_times_is_rejected():
    model = Model()
    model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters())
    with pytest.raises(ArgumentError, match="LBFGS evaluates its closure several times"):
        fit(model, DataLoader(data(), 4), global_batch_size=8)


def run(ranks, **env):
    told = {f"TEST_{key.upper()}": value if isinstance(value, str) else json.dumps(value) for key, value in env.items()}
    return run_ranks(CHECKS, ranks, env=told, timeout=600)


def check(result, numbers, exact):
    for number in numbers:
        found = result.reports[number]
        assert found[f"error {exact}"] < 1e-6 and found[f"loss {exact}"] < 1e-6, str(result)
        assert found[f"equal {exact}"] or not exact, str(result)
        assert found[f"steps {exact}"] == [15, 5, 3] and found["rate"] == pytest.approx(0.05 * 0.95**15)
        assert found["history"][1] == [0, 1, 2, 3, 4] * 3


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_weights_losses_and_counts_are_those_of_one_process_on_any_number_of_ranks(count):
    result = run(count, exact=[True, False], workers="1" if count == 2 else "0")
    for exact in (True, False):
        check(result, range(count), exact)
        assert all(max(of_rank[f"epoch {exact}"]) < 1e-6 for of_rank in result.reports.values())


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("point", ["now", "SIGTERM"])
def test_a_step_in_which_a_rank_is_killed_or_leaves_has_all_of_its_samples(exact, point):
    result = run(4, failure="continue", exact=[exact], ends=[[1, 6, point]])
    check(result, [0, 2, 3], exact)
    history = result.reports[0]["history"][0]
    assert [times for _, times in history] == [1] * 6 + [2 if point == "now" else 1] + [1] * 8
    assert [size for size, _ in history[7:]] == [3] * 8


@pytest.mark.slow
def test_nothing_of_a_step_that_is_begun_again_is_counted_twice():
    """Rank 0 of 3 dies in its second pass, and with it the 8 samples that it counted in the step before."""
    result = run(3, failure="continue", exact=[False], ends=[[0, 6, "now", 1]])
    check(result, [1, 2], False)
    assert result.reports[1]["counted"] == result.reports[2]["counted"] == [70, 62, 70]


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_a_rank_that_is_killed_is_replaced_in_the_middle_of_an_epoch(exact):
    result = run(3, failure="replace", exact=[exact], ends=[[1, 6, "now"]], wanted="3", waits=[7])
    check(result, [0, 2, 3], exact)
    sizes = [size for size, _ in result.reports[0]["history"][0]]
    assert sizes == [3] * 6 + [2] * sizes.count(2) + [3] * (9 - sizes.count(2)) and 0 < sizes.count(2) < 5


SCRIPT = """
import os
import sys
import warnings
import torch
import ring_plugins as ring

ring.init(ranks=2)
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from ring_plugins.core.base.errors import RingError
from ring_plugins.lightning import RingStrategy
from tests.worker import report

warnings.simplefilter("ignore")
data = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(3)))


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 7:
            trainer.save_checkpoint(self.path)


def fit(batch_size, path=None, ckpt_path=None, sampler=None, **arguments):
    trainer = Trainer(
        strategy=RingStrategy(**arguments), accelerator="cpu", devices=2, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Saves(path)],
    )
    model = Model()
    loader = DataLoader(data, batch_size, shuffle=sampler is None, sampler=sampler, drop_last=True)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return torch.cat([one.detach().flatten() for one in model.parameters()]), trainer.global_step


def error(name, function):
    try:
        function()
    except RingError as found:
        report(name, f"{type(found).__name__}: {found}")


if "errors" in sys.argv:
    error(sys.argv[2], {
        "order": lambda: fit(4, sampler=range(60) if ring.rank() else range(59, -1, -1), global_batch_size=12),
        "size": lambda: fit(4, global_batch_size=12 + 4 * ring.rank()),
        "loader": lambda: fit(4 + ring.rank(), global_batch_size=12),
    }[sys.argv[2]])
else:
    root = sys.argv[1]
    expected, steps = fit(4, f"{root}/global.ckpt", global_batch_size=12)
    plain, _ = fit(6, f"{root}/plain.ckpt")
    again, _ = fit(4, None, f"{root}/global.ckpt", global_batch_size=12)
    other, _ = fit(2, None, f"{root}/global.ckpt", global_batch_size=12)
    from_plain, taken = fit(6, None, f"{root}/plain.ckpt", global_batch_size=12)
    to_plain, _ = fit(6, None, f"{root}/global.ckpt")
    report("equal", torch.equal(expected, again))
    report("steps", [steps, taken])
    report("errors", [(one - expected).abs().max().item() for one in (plain, other, from_plain, to_plain)])
"""


@pytest.mark.slow
def test_a_fit_goes_on_with_other_batches_a_step_and_from_and_to_one_with_a_batch_per_rank(tmp_path):
    for found in run_ranks(SCRIPT, 2, args=[str(tmp_path)], timeout=600).reports.values():
        assert found["equal"] and found["steps"] == [10, 10] and max(found["errors"]) < 1e-6, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "order",
            "MismatchError: the ranks' steps of RingStrategy(global_batch_size=...) do not have the same samples",
        ),
        ("size", "RingStrategy(global_batch_size) is 12 and 16"),
        ("loader", "global_batch_size=12 on rank 1 is no multiple of the loader's batch_size=5"),
    ],
)
def test_what_differs_by_rank_is_an_error_on_all_ranks(what, says):
    found = run_ranks(SCRIPT, 2, args=["errors", what], timeout=600, check=False).values(what)
    assert len(found) == 2 and all(says in text for text in found), found
