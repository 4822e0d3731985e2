"""Ranks are killed in a `Trainer.fit` and other processes take their places: the end is that of a replay."""

import csv
import itertools
import json
import sys
from pathlib import Path

import pytest
from torch.utils.data import DistributedSampler

from tests.launch import run_ranks, slowness
from tests.torch.test_replacement import replayed

CHECKS = Path(__file__).with_name("checks_replacement.py")
EPOCHS, BATCHES, SEED = 3, 4, 7


def fit(tmp_path, deaths, ranks=3, pending=True, arguments=(), launcher="spawned", **options):
    env = {
        "TEST_DEATHS": json.dumps(deaths), "TEST_ROOT": str(tmp_path),
        **({"TEST_PENDING": str(60 * slowness())} if pending else {}), **options.pop("env", {}),
    }  # fmt: skip
    return run_ranks(CHECKS, ranks, launcher, list(arguments), env, timeout=150, **options)


def check(result, slots=range(3), ranks=3):
    """That all ranks of the end have the same, and what a replay gives; returns it, and what each has seen itself."""
    found = [result.reports[slot]["found"] for slot in slots]
    assert all(one == found[0] for one in found), str(result)
    first = found[0]
    assert len(first["history"]) == EPOCHS * BATCHES
    # A rank that was lost in a step took part in its averages, or did not; the same holds for all that are left.
    possible = [
        [before, after] if len(after) < len(before) else [after]
        for before, after in itertools.pairwise([list(range(ranks)), *first["history"]])
    ]
    assert first["weights"] in [[replayed(choice, BATCHES)] * 2 for choice in itertools.product(*possible)]
    assert first["buffers"] == [EPOCHS * BATCHES] * 2
    assert first["rates"] == [0.5 * 0.5**EPOCHS] * 2
    assert first["progress"] == [EPOCHS, EPOCHS * BATCHES, EPOCHS * BATCHES - 1]
    assert [mean for _, mean in first["validated"]] == [
        sum(slot + 1 for slot in members) / len(members) for members, _ in first["validated"]
    ]
    assert first["ranks"] == [[rank, len(found), slot] for rank, slot in enumerate(slots)]
    assert first["on SIGTERM"] == "PreemptionNotice._note"
    assert first["writes"] == list(range(len(found))) and first["devices"] == len(found)
    own = [result.reports[slot]["own"] for slot in slots]
    for slot, one in zip(slots, own, strict=True):
        check_data(one["seen"], slot, ranks, is_new=one["number"] >= ranks)
    return first, own


def check_data(seen, slot, ranks, is_new):
    """That a process has trained on the share of its slot, from the batch on with which it joined."""
    first_epoch = min(map(int, seen))
    sampler = DistributedSampler(range(BATCHES * ranks), ranks, slot, seed=SEED)
    for epoch, indices in seen.items():
        sampler.set_epoch(int(epoch))
        share = list(sampler)
        assert indices == share[-len(indices) :]
        assert len(indices) == BATCHES or (is_new and int(epoch) == first_epoch)


def logged(root):
    """Steps in the logger's one file, in the order of its lines."""
    (file,) = Path(root).rglob("metrics.csv")
    return [int(row["step"]) for row in csv.DictReader(file.open()) if row.get("loss_step")]


@pytest.mark.slow
def test_another_process_takes_the_place_of_rank_0_in_the_middle_of_an_epoch(tmp_path):
    # "barrier 6" is inside a step's reduction.
    result = fit(tmp_path, [[0, 4, "barrier 6 in"]])
    found, own = check(result)
    everyone, joined = [0, 1, 2], found["history"].index([1, 2]) + 2  # those that are left wait in their second step
    assert joined in (6, 7)
    assert found["history"] == [everyone] * (joined - 2) + [[1, 2]] * 2 + [everyone] * (12 - joined)
    assert [one["number"] for one in own] == [3, 1, 2]
    assert [len(one["seen"]["1"]) for one in own] == [8 - joined, 4, 4]
    assert own[0]["hooks"] == ["train start", "epoch 0", "epoch 2"]
    assert len({Path(path).parent for path in found["checkpoints"][2]}) == 1
    assert len(found["checkpoints"][2]) == EPOCHS
    # Nothing that was logged is lost or logged twice, but the steps of which rank 0 had not written the line.
    steps = logged(tmp_path)
    assert sorted(set(steps)) == steps and len(steps) >= EPOCHS * BATCHES - 1
    assert "in the place of rank 0 joined; the job goes on with 3 ranks since" in result.output
    assert "ring run: other processes took the place of rank 0, and all 3 ended normally." in result.output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("point", ["now", "barrier 6 in", "barrier 6 before", "SIGTERM"])
def test_any_rank_may_be_lost_anywhere_in_a_step(tmp_path, victim, point):
    _, own = check(fit(tmp_path, [[victim, 4, point]]))
    assert own[victim]["number"] == 3
    assert len(own[victim]["seen"]["1"]) in (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", ["in validation", "in checkpoint"])
def test_a_rank_may_be_lost_between_steps(tmp_path, victim, point):
    _, own = check(fit(tmp_path, [[victim, 1, point]]))
    assert own[victim]["number"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("point", [f"joiner round {n} {when}" for n in (1, 2, 3) for when in ("before", "in")])
def test_a_joiner_may_die_while_it_joins_and_the_next_one_joins(tmp_path, point):
    _, own = check(fit(tmp_path, [[1, 2, "now"], [1, 0, point]]))
    assert own[1]["number"] == 4


@pytest.mark.slow
def test_a_joiner_that_cannot_load_the_state_ends_alone_and_the_next_one_joins(tmp_path):
    """In the place of rank 0: the others take over its logger once more."""
    result = fit(tmp_path, [[0, 2, "now"], [0, 0, "joiner load raises"]])
    _, own = check(result)
    assert own[0]["number"] == 4
    assert "KeyError: 'a module that cannot load'" in result.output
    assert "It ends, and the other ranks go on without it:" in result.output
    steps = logged(tmp_path)
    assert sorted(set(steps)) == steps and len(steps) >= EPOCHS * BATCHES - 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", [f"round {n} {when}" for n in (1, 3) for when in ("before", "in")])
def test_so_may_a_member_while_another_process_joins(tmp_path, victim, point):
    _, own = check(fit(tmp_path, [[1, 2, "now"], [victim, 3, point]]))
    assert sorted(one["number"] for one in own) == sorted([3, 4, 2 - victim])


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        [[0, 2, "now"], [1, 2, "now"]],
        [[0, 1, "barrier 6 in"], [0, 6, "joiner now"], [2, 9, "now"]],
        [[0, 1, "now"], [1, 3, "now"], [2, 5, "now"]],
        [[0, 1, "now"], [0, 7, "joiner SIGTERM"]],
        [[1, 5, "now"], [2, 11, "now"]],
    ],
)
def test_several_may_be_replaced_at_once_or_in_a_row(tmp_path, deaths):
    ends_alone = [2] if deaths[-1][1] == EPOCHS * BATCHES - 1 else []
    check(fit(tmp_path, deaths), [slot for slot in range(3) if slot not in ends_alone])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "arguments", "env"),
    [
        ({"reload_dataloaders_every_n_epochs": 1}, [], {}),
        ({"check_val_every_n_epoch": 2}, ["--progress"], {}),
        ({"val_check_interval": 2}, [], {"TEST_WORKERS": "1"}),
        ({}, ["--two-loaders"], {}),
        ({"num_sanity_val_steps": 0, "limit_train_batches": 4}, [], {}),
    ],
)
def test_loaders_and_validation_of_other_kinds(tmp_path, trainer, arguments, env):
    env = {"TEST_TRAINER": json.dumps(trainer), **env}
    check(fit(tmp_path, [[0, 4, "now"]], arguments=arguments, env=env))


@pytest.mark.slow
def test_gradients_may_accumulate(tmp_path):
    """A process joins where a step begins."""
    result = fit(tmp_path, [[1, 2, "now"]], env={"TEST_TRAINER": json.dumps({"accumulate_grad_batches": 2})})
    found = [result.reports[slot]["found"] for slot in range(3)]
    assert all(one == found[0] for one in found), str(result)
    assert found[0]["progress"] == [EPOCHS, EPOCHS * BATCHES // 2, EPOCHS * BATCHES - 1]
    assert found[0]["history"][-1] == [0, 1, 2]


@pytest.mark.slow
def test_the_job_ends_when_fewer_than_min_ranks_are_left(tmp_path):
    """Started as docs/fault_tolerance.md starts train.py."""
    ring_run = [sys.executable, "-m", "ring_plugins", "run", "-n", "3", "--on-failure", "replace", "--min-ranks", "3"]
    result = fit(tmp_path, [[1, 2, "now"]], env={"TEST_MIN": "3"}, launcher=[*ring_run, sys.executable], check=False)
    assert result.returncode == 1 and not any("found" in report for report in result.reports.values())
    assert "Training cannot go on with 2 ranks: min_ranks=3." in result.output


@pytest.mark.slow
def test_the_job_ends_while_a_process_waits_to_join(tmp_path):
    """The others do not wait for it; it ends without an error."""
    result = fit(tmp_path, [[1, 10, "now"]], pending=False)
    check(result, [0, 2])
    assert "Traceback" not in result.output


#: Two ranks become four in the second epoch; TEST_SAMPLER adds the script's own sampler.
GROWS = """
    import os, warnings, lightning as L, torch
    from torch.utils.data import DataLoader, DistributedSampler
    import ring_plugins as ring
    from ring_plugins.core.world import current
    from ring_plugins.lightning import RingStrategy
    from tests.torch.checks_replacement import begin_step, gradient, own_deaths, slots_taken
    from tests.worker import report

    warnings.simplefilter("ignore")

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(20_000))
            self.history, self.seen, self.validated = [], [], []

        def training_step(self, batch, index):
            slot = current().shard[0]
            self.seen.append([self.current_epoch, int(batch)])
            begin_step(self.trainer.global_step, own_deaths(slot, 2), 2, slot)
            return gradient(self.trainer.global_step, slot) * self.weight.sum()

        def on_train_batch_end(self, *_):
            self.history.append(slots_taken())

        def validation_step(self, batch, index):
            self.log("mean", batch.double().mean(), on_epoch=True, sync_dist=True)

        def on_validation_epoch_end(self):
            self.validated.append(len(current().world_ranks))

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.5, momentum=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def on_save_checkpoint(self, checkpoint):
            checkpoint["kept"] = self.history, self.validated

        def on_load_checkpoint(self, checkpoint):
            self.history, self.validated = map(list, checkpoint["kept"])

    model, data = Model(), range(24)
    strategy = RingStrategy(on_failure="replace", max_ranks=4)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )
    sampler = None
    if "TEST_SAMPLER" in os.environ:
        world = ring.init(ranks=2, on_failure="replace", max_ranks=4)
        sampler = DistributedSampler(data, ring.size(), ring.rank())
    trainer.fit(model, DataLoader(data, sampler=sampler, shuffle=sampler is None), DataLoader(range(8)))
    found = [
        sorted(set(model.weight.tolist())), model.history, model.validated, trainer.world_size, trainer.num_devices,
        trainer.global_step, trainer.current_epoch, trainer.callback_metrics["mean"].item(),
    ]
    report("found", found)
    report("seen", model.seen)
"""


def check_grown(result):
    """What all four ranks of GROWS have, and that they have seen each sample once in each epoch."""
    history = [[0, 1]] * 12 + [[0, 1, 2, 3]] * 12
    found = [replayed(history, ends=[12, 18, 24]), history, [2, 4, 4], 4, 4, 24, 3, 3.5]
    assert result.values("found") == [found] * 4
    for epoch in range(3):
        seen = [sample for of_rank in result.values("seen") for of, sample in of_rank if of == epoch]
        assert sorted(seen) == list(range(24)), epoch


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [{}, {"TEST_SAMPLER": "1"}])
def test_a_job_grows_where_an_epoch_begins(sampler):
    env = {"TEST_DEATHS": "[]", "TEST_ADDED": "[[1, 2, 2]]", "TEST_MOST": "4", "TEST_PENDING": str(60 * slowness())}
    result = run_ranks(GROWS, 2, env={**env, **sampler}, timeout=150)
    check_grown(result)
    assert "ring run: ranks 2, 3 joined, and all 4 ended normally." in result.output


FINETUNING = Path(__file__).with_name("checks_finetuning.py")


@pytest.mark.slow
def test_processes_join_after_layers_were_unfrozen():
    """Two, one after the other, behind the epoch in which `BackboneFinetuning` has added a group to the optimizer."""
    result = run_ranks(FINETUNING, 3, timeout=int(150 * slowness()))
    found = result.values("found")
    assert found == [found[0]] * 3, str(result)
    assert found[0]["numbers"] == [4, 3, 2]
    assert found[0]["groups"] == 2 and found[0]["flags"] == [True] * 6 and found[0]["tracks"]
    assert found[0]["momenta"] == 6
