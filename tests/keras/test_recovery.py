"""Ranks are killed in the middle of a `fit`: the others end with the weights that a replay of the losses gives."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.launch import run_ranks

CHECKS = Path(__file__).with_name("checks_recovery.py")
BACKENDS = ("tensorflow", "torch", "jax")
STEPS, EPOCHS = 4, 2


def gradient(step, rank):
    """Of every weight: its average over any of up to four ranks is exact."""
    return 12.0 * ((7 * step + 3 * rank) % 5 - 2)


def fit(backend, deaths, ranks=3, environment=None, **options):
    env = {"TEST_DEATHS": json.dumps(deaths), "KERAS_BACKEND": backend, **(environment or {})}
    return run_ranks(CHECKS, ranks, env=env, timeout=120, **options)


def replayed(averaged_over, counts):
    """The weights after SGD with momentum 0.5 and rate 0.5 has taken the averages over these ranks."""
    weight = velocity = np.float32(0)
    for step, ranks in enumerate(averaged_over):
        came = [rank for rank in ranks if step % STEPS < counts.get(rank, STEPS)]
        average = np.float32(sum(gradient(step % STEPS, rank) for rank in came) / len(came))
        velocity = np.float32(0.5) * velocity - np.float32(0.5) * average
        weight = weight + velocity
    return float(weight)


def check_survivors(result, deaths, ranks=3, counts={}):  # noqa: B006 - nobody changes it
    left = [rank for rank in range(ranks) if rank not in deaths]
    found = [result.reports[rank]["found"] for rank in left]
    assert all(one == found[0] for one in found), str(result)
    assert found[0]["left"] == left
    after_steps = found[0]["history"]
    assert len(after_steps) == STEPS * EPOCHS
    # A rank that died in a step took part in its averages, or did not; the same holds for all that are left.
    every = list(range(ranks))
    possible = [
        [before, after] if before != after else [after] for before, after in itertools.pairwise([every, *after_steps])
    ]
    weights = {replayed(choice, counts) for choice in itertools.product(*possible)}
    (kernel,), (bias,) = found[0]["weights"]
    assert kernel == bias
    assert kernel in weights
    assert sorted(rank for losses, _ in found[0]["changes"] for rank in losses) == sorted(deaths)
    assert all(len(set(steps)) == 1 and steps[0] < STEPS * EPOCHS for _, steps in found[0]["changes"])  # within fit


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("point", ["before the step", *(f"barrier {n} in" for n in (1, 2, 3, 5)), "barrier 2 before"])
def test_a_rank_may_be_killed_anywhere_in_a_step(backend, point):
    deaths = {1: [2, point]}
    check_survivors(fit(backend, deaths), deaths)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("step", "point"), [(2, "before the step"), (2, "barrier 2 in"), (5, "before the step")])
def test_so_may_one_while_another_has_run_out(backend, step, point):
    deaths, counts = {2: [step, point]}, {1: 2, 2: 3}
    result = fit(backend, deaths, environment={"TEST_COUNTS": json.dumps(counts)})
    check_survivors(result, deaths, counts=counts)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("point", ["before the step", "barrier 2 in", "barrier 3 before"])
def test_so_may_rank_0(backend, point):
    deaths = {0: [2, point]}
    check_survivors(fit(backend, deaths), deaths)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_leaves_after_the_batch_in_which_it_gets_sigterm(backend):
    deaths = {0: [2, "SIGTERM"]}
    result = fit(backend, deaths)
    check_survivors(result, deaths)
    assert "rank 0 (process " in result.output and "left on SIGTERM" in result.output
    assert "ring run: rank 0 left, and the other 2 ended normally." in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_after_another_may_be_killed_until_one_is_left(backend):
    deaths = {0: [1, "barrier 2 in"], 1: [6, "before the step"]}
    check_survivors(fit(backend, deaths), deaths)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_rank_writes_again_what_rank_0_was_writing(backend, tmp_path):
    deaths = {0: [4, "while saving"]}  # at the end of the first epoch
    result = fit(backend, deaths, environment={"TEST_FILES": str(tmp_path)})
    check_survivors(result, deaths)
    files = ["1.keras", "2.keras", "backup", "best.keras", "log.csv"]
    assert result.reports[1]["saved"] == [True, *files]
    assert [line.partition(",")[0] for line in (tmp_path / "log.csv").read_text().splitlines()] == ["epoch", "0", "1"]


@pytest.mark.slow
def test_writers_that_only_rank_0_has_end_with_it_and_a_warning_says_so(tmp_path):
    deaths = {0: [5, "before the step"]}
    result = fit("torch", deaths, environment={"TEST_FILES": str(tmp_path), "TEST_LONE": "1"})
    assert "BackupAndRestore and CSVLogger and ModelCheckpoint of rank 0 would end with that rank" in result.output
    assert (tmp_path / "1.keras").exists()
    assert not (tmp_path / "2.keras").exists()
    check_survivors(result, deaths)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rate", ["number", "schedule"])
@pytest.mark.parametrize("step", [2, 5])
def test_the_rate_follows_the_ranks_that_are_left(backend, rate, step):
    result = fit(backend, {0: [step, "before the step"]}, environment={"TEST_RATE": rate})
    full = [3.0] * (step + 1) + [2.0] * (STEPS * EPOCHS - step - 1)
    read_after = rate == "schedule"  # the update that counts the step
    at = range(read_after, len(full) + read_after)
    expected = [0.5 + 0.5 * (multiple - 1) * min(1, i / STEPS) for i, multiple in zip(at, full, strict=True)]
    for rank in (1, 2):
        assert result.reports[rank]["found"]["rates"] == pytest.approx(expected)
