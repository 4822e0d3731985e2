"""Ranks are killed in the middle of a `Trainer.fit`: the others end with the weights of a replay of the losses."""

import copy
import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.lightning import RingStrategy
from ring_plugins.lightning.recovery import _Gathered, take_over, take_versions, versions_of
from tests.keras.test_recovery import gradient
from tests.launch import run_ranks

CHECKS = Path(__file__).with_name("checks_recovery.py")
STEPS, EPOCHS, SAMPLES = 4, 3, 12


def fit(tmp_path, deaths, ranks=3, arguments=(), **options):
    env = {"TEST_DEATHS": json.dumps(deaths), "TEST_ROOT": str(tmp_path), **options.pop("env", {})}
    return run_ranks(CHECKS, ranks, "spawned", list(arguments), env, timeout=120, **options)


def replayed(averaged_over):
    """The weights after SGD with momentum 0.5 and rate 0.5 has taken the averages over these ranks."""
    weight = velocity = np.float32(0)
    for step, ranks in enumerate(averaged_over):
        velocity = np.float32(0.5) * velocity + np.float32(sum(gradient(step % STEPS, r) for r in ranks) / len(ranks))
        weight = weight - np.float32(0.5) * velocity
    return float(weight)


def check_survivors(result, deaths, ranks=3):
    left = [rank for rank in range(ranks) if rank not in deaths]
    found = [result.reports[rank]["found"] for rank in left]
    for one in found:
        assert {**one, "history": 0} == {**found[0], "history": 0}, str(result)
    first = found[0]
    assert first["left"] == left
    assert first["new ranks"] == [[new, len(left)] for new in range(len(left))]
    assert first["writes"] == list(range(len(left)))
    every = list(range(ranks))
    # A rank that died in a step took part in its averages, or did not; the same holds for all that are left.
    possible = [
        [before, after] if before != after else [after]
        for before, after in itertools.pairwise([every, *first["history"]])
    ]
    (large,), (small,) = first["weights"]
    assert large == small
    assert large in {replayed(choice) for choice in itertools.product(*possible)}
    # The epoch after the last loss has every sample once (or twice, where samplers pad).
    last = first["seen"][-1]
    assert sorted({index for of_rank in last for index in of_rank}) == list(range(SAMPLES))
    assert sum(map(len, last)) == -(-SAMPLES // len(left)) * len(left)
    for rank in deaths:
        assert f"rank {rank} (process " in result.output
    return first


@pytest.mark.slow
def test_rank_0_is_killed_in_a_step_and_the_next_one_takes_its_roles(tmp_path):
    """In the default suite, test_replacement.py kills rank 0 so."""
    deaths = {0: [2, "barrier 2 in"]}
    check_survivors(fit(tmp_path, deaths), deaths)


def test_a_metric_is_as_before_after_a_fit():
    metric = MeanMetric()
    before = dict(vars(metric))
    gathered = _Gathered(metric)
    assert metric.dist_sync_fn is not None
    copied = copy.deepcopy(metric)
    assert copied.sync.__self__ is copied
    gathered.undo()
    assert vars(metric) == before


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("point", ["in step", *(f"barrier {n} in" for n in (1, 2, 3, 4, 5)), "barrier 2 before"])
def test_a_rank_may_be_killed_anywhere_in_a_step(tmp_path, victim, point):
    deaths = {victim: [2, point]}
    found = check_survivors(fit(tmp_path, deaths), deaths)
    left = [rank + 1 for rank in range(3) if rank != victim]
    assert found["logged"] == {"mean": sum(left) / 2, "synced": sum(left) / 2}
    assert all(mean == sum(rank + 1 for rank in ranks) / len(ranks) for ranks, mean in found["validated"])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", ["in validation", "in checkpoint"])
def test_a_rank_may_be_killed_between_steps(tmp_path, victim, point):
    deaths = {victim: [1, point]}
    found = check_survivors(fit(tmp_path, deaths), deaths)
    assert all(mean == sum(rank + 1 for rank in ranks) / len(ranks) for ranks, mean in found["validated"])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_leaves_after_the_step_in_which_it_gets_sigterm(tmp_path, victim):
    deaths = {victim: [2, "SIGTERM"]}
    result = fit(tmp_path, deaths)
    found = check_survivors(result, deaths)
    left = [rank for rank in range(3) if rank != victim]
    assert found["history"] == [[0, 1, 2]] * 2 + [left] * (len(found["history"]) - 2)
    assert "left on SIGTERM" in result.output and "the other 2 ended normally." in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_one_rank_after_another_may_be_killed_until_one_is_alone(tmp_path):
    deaths = {0: [1, "barrier 2 in"], 2: [5, "in step"]}
    check_survivors(fit(tmp_path, deaths), deaths)


@pytest.mark.slow
def test_the_job_ends_when_fewer_than_min_ranks_are_left(tmp_path):
    result = fit(tmp_path, {0: [2, "in step"]}, env={"TEST_MIN": "3"}, check=False)
    assert result.returncode == 1 and not any("found" in report for report in result.reports.values())
    assert "min_ranks=3" in result.output


@pytest.mark.slow
def test_synchronized_batch_norm_is_rejected(tmp_path):
    result = fit(tmp_path, {}, arguments=["--sync-batchnorm"], check=False)
    assert 'Trainer(sync_batchnorm=True) does not support on_failure="continue" yet' in result.output


def test_what_cannot_be_is_rejected_at_once():
    with pytest.raises(ArgumentError, match="on_failure='later' must be"):
        RingStrategy(on_failure="later")
    with pytest.raises(ArgumentError, match="min_ranks=0 is not a positive"):
        RingStrategy(on_failure="continue", min_ranks=0)
    with pytest.raises(ArgumentError, match='min_ranks=2 needs on_failure="continue" or "replace"'):
        RingStrategy(min_ranks=2)


@pytest.mark.slow
def test_init_and_the_strategy_must_agree():
    result = run_ranks(
        """
        import lightning as L, ring_plugins as ring
        from lightning.pytorch.demos.boring_classes import BoringModel
        from ring_plugins.lightning import RingStrategy
        ring.init(ranks=2)
        strategy = RingStrategy(on_failure="continue")
        L.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, max_epochs=1).fit(BoringModel())
        """,
        2,
        check=False,
    )
    assert result.returncode != 0
    assert "init() was called before with on_failure=" in result.output


@pytest.fixture
def logger(tmp_path):
    """Of the first rank 0, with one line in its file."""
    found = CSVLogger(tmp_path)
    found.log_hyperparams({"rate": 0.5})
    log(found, 0, loss=8)
    return found


def log(logger, step, **metrics):
    logger.log_metrics(metrics, step)
    logger.save()


def successor(logger):
    """A logger of another process, which takes over."""
    found = CSVLogger(logger.save_dir)
    assert found.version == 1
    take_versions([found], versions_of([logger]))
    take_over(found)
    return found


def lines(logger):
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_ranks_that_take_over_in_turn_add_lines_to_one_file(logger):
    second = successor(logger)
    log(second, 1, loss=7)
    third = successor(logger)
    log(third, 2, accuracy=1, loss=6)
    log(second, 3, loss=5)  # it has another column than those that this one knows
    take_over(second)  # it has a writer already
    log(second, 4, loss=4)
    assert lines(logger) == [
        ["accuracy", "loss", "step"], ["", "8", "0"], ["", "7", "1"], ["1", "6", "2"], ["", "5", "3"], ["", "4", "4"],
    ]  # fmt: skip
    assert [path.name for path in Path(logger.root_dir).iterdir()] == ["version_0"]
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "rate: 0.5\n"


def test_a_line_that_was_not_written_to_its_end_is_removed(logger):
    with (Path(logger.log_dir) / "metrics.csv").open("a") as file:
        file.write("7,")
    log(successor(logger), 1, loss=7)
    assert lines(logger) == [["loss", "step"], ["8", "0"], ["7", "1"]]


def test_one_that_takes_over_before_anything_was_written_begins_the_file(tmp_path):
    logger = CSVLogger(tmp_path)
    take_over(logger)
    log(logger, 0, loss=8)
    assert lines(logger) == [["loss", "step"], ["8", "0"]]


def test_versions_of_loggers_for_files_are_taken_over_and_others_stay():
    """TensorBoardLogger needs a package that tests do not have."""
    kind = type("TensorBoardLogger", (), {"__module__": "lightning.pytorch.loggers.tensorboard", "version": 3})
    ours, theirs, other = kind(), kind(), object()
    assert versions_of([theirs, other]) == [("TensorBoardLogger", 3), ("object", None)]
    take_versions([ours, other], versions_of([theirs, other]))
    assert ours._version == 3
    take_versions([other], versions_of([theirs]))  # a script may give ranks different loggers
    take_over(ours)
