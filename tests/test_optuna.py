"""All ranks compute the trials of one study, with the values that rank 0 has drawn, and prune alike."""

import pytest

import ring_plugins as ring
from tests.launch import run_ranks

optuna = pytest.importorskip("optuna")

from ring_plugins.optuna import SharedTrial, optimize  # noqa: E402 - it is skipped without Optuna

SEARCH = """
import os
import optuna
import ring_plugins as ring
from ring_plugins.optuna import optimize
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
seen = []

def objective(trial):
    if os.environ["TEST_DIFFERS"] == "1" and trial.number == 2:
        trial.suggest_float("x" if ring.rank() == 0 else "y", -1, 1)
    x, kind = trial.suggest_float("x", -1, 1), trial.suggest_categorical("kind", ["a", "b"])
    seen.append([trial.number, x, kind, trial.params == {"x": x, "kind": kind}])
    for step in range(3):
        trial.report(x * x + ring.rank(), step)
        if trial.should_prune():
            seen[-1].append(step)
            raise optuna.TrialPruned
    if trial.number == 3:
        raise ValueError("a trial that fails on all ranks")
    return x * x

pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=0)
study = optuna.create_study(pruner=pruner) if ring.rank() == 0 else None
optimize(study, objective, n_trials=8, catch=ValueError)
report("seen", seen)
report("states", [trial.state.name for trial in study.trials] if study else [])
"""


@pytest.mark.slow
def test_all_ranks_compute_the_trials_of_one_study():
    result = run_ranks(SEARCH, 3, env={"TEST_DIFFERS": "0"}, timeout=120)
    first, *others = result.values("seen")
    assert others == [first, first] and len(first) == 8 and all(one[3] for one in first)
    states = result.values("states")[0]
    assert states[3] in ("FAIL", "PRUNED")
    assert [len(one) > 4 for one in first] == [state == "PRUNED" for state in states]


@pytest.mark.slow
def test_ranks_that_ask_a_trial_for_different_things_are_told():
    result = run_ranks(SEARCH, 2, env={"TEST_DIFFERS": "1"}, timeout=120, check=False)
    assert "rank 0 asked its trial for suggest_float('x', -1, 1), and rank 1 for suggest_float('y', -1, 1)" in (
        result.output
    )
    assert result.returncode, result


@pytest.mark.filterwarnings("ignore")
def test_a_study_on_one_rank(monkeypatch):
    told = []
    monkeypatch.setattr(ring.core.functions, "rank", lambda: 0)
    monkeypatch.setattr(ring.core.functions, "broadcast_object", lambda item: told.append(item) or item)
    study = optuna.create_study()
    optimize(study, lambda trial: trial.suggest_int("n", 1, 3), n_trials=2)
    assert len(study.trials) == 2 and [one for one in told if isinstance(one, bool)] == [True, True, False]
    with pytest.raises(ring.ArgumentError, match="rank 0 has the study"):
        optimize(None, lambda trial: 0.0)
    with pytest.raises(ring.ArgumentError, match="n_jobs=2"):
        optimize(study, lambda trial: 0.0, n_jobs=2)


def test_an_error_of_rank_0s_trial_is_everyones(monkeypatch):
    monkeypatch.setattr(ring.core.functions, "rank", lambda: 1)
    error = ValueError("a distribution of another trial")
    monkeypatch.setattr(ring.core.functions, "broadcast_object", lambda _: ("number", None, error))
    with pytest.raises(ValueError, match="another trial"):
        SharedTrial().number  # noqa: B018


@pytest.mark.parametrize("told", ["other", "rank 0 has ended it", "rank 1 has ended it", "addresses"])
def test_a_rank_out_of_step_raises_whatever_the_study_catches(monkeypatch, told):
    """Otherwise its trials and those of rank 0 would differ from then on."""
    answers = {
        "other": [True, ("suggest_float('y', 0, 1)", 0.5, None)],
        "rank 0 has ended it": [True, False],
        "rank 1 has ended it": [True, ("suggest_float('x', 0, 1)", 0.5, None), ("should_prune()", False, None)],
        "addresses": [True, (f"suggest_categorical('x', [{object()!r}])", 0.5, None), False],
    }[told]
    monkeypatch.setattr(ring.core.functions, "rank", lambda: 1)
    monkeypatch.setattr(ring.core.functions, "broadcast_object", lambda _: answers.pop(0))

    def objective(trial):
        if told == "addresses":
            trial.suggest_categorical("x", [object()])
        else:
            trial.suggest_float("x", 0, 1)

    if told == "addresses":
        optimize(None, objective, catch={Exception})
        return
    with pytest.raises(
        ring.MismatchError, match=told.replace(" it", " a trial") if told != "other" else "rank 0 asked its trial for"
    ):
        optimize(None, objective, catch={Exception})
