"""A `fit` of all ranks: what they compare between steps, how it ends, and how a process joins it."""

from types import SimpleNamespace

from ring_plugins.keras import consistency, synchronized_fit
from ring_plugins.keras.consistency import KerasChecks
from ring_plugins.keras.synchronized_fit import SynchronizedFit
from tests.keras.launches import BACKENDS, on_ranks


def test_a_loss_that_a_step_has_found_is_told_behind_it_though_the_checks_have_followed(monkeypatch):
    told: list[int] = []
    elastic = SimpleNamespace(view=0, tell_changes=lambda: told.append(elastic.view))
    for module in (consistency, synchronized_fit):
        monkeypatch.setattr(module, "current", lambda: SimpleNamespace(elastic=elastic))
    monkeypatch.setattr(consistency, "is_initialized", lambda: True)
    wanted = dict.fromkeys(["_model", "group", "compression", "error_feedback", "backups"])
    fit = SynchronizedFit(SimpleNamespace(**wanted, average_gradients=False), None, [], False)
    fit._checks = KerasChecks(reads_in_pass=False)
    for view in (0, 1, 1, 3):
        elastic.view = view
        fit._checks.number()  # which the exchange compares
        fit._after_exchange(wants_change=False)
    assert told == [1, 3]


@on_ranks("fit_that_raises", *BACKENDS)
def test_a_fit_that_raises_is_undone_at_once(seen):
    first, second = seen
    for found in (first, second):
        assert found["error"] == "ValueError: not today"
        assert found["left"] == []
    assert first["apart"] != second["apart"]
    assert first["together"] == second["together"]


@on_ranks("drift_in_a_later_step", "torch", slow=("tensorflow", "jax"))
def test_weights_and_options_are_compared_again_in_later_steps(seen):
    for found in seen:
        error, taken = found["weight"]
        assert error.startswith("DriftError: after step 4 of epoch 1 the weights of rank 0 differ"), error
        assert taken == 4 and "MetricAverageCallback" not in error
        error, taken = found["option"]
        assert taken == 4 and "the optimizer's epsilon differs among ranks (rank 0: 1e-07, rank 1: 0.01)" in error
        assert found["nothing"] == ["none", 8]
        if "loop" in found:
            assert "after 4 steps the weights of rank 0 differ from those of rank 1" in found["loop"][0]


@on_ranks("weights_that_drift_before_a_checkpoint", "torch", slow=("tensorflow", "jax"))
def test_weights_that_differ_are_reported_before_they_are_saved(seen):
    for rank, (without, (*saving, error)) in enumerate(seen):
        assert len(without) == 1 and without[0].startswith("DriftError: when fit() ended the weights of rank 0 differ")
        assert len(saving) == (rank == 0)
        assert error == "none", "it has been told before"
        assert all(
            line.startswith("at the end of this epoch, before checkpoints are saved, the weights") for line in saving
        )


@on_ranks("fits_after_a_join", "torch", slow=("tensorflow", "jax"))
def test_a_fit_after_that_which_a_process_has_joined_has_all_its_epochs(seen):
    assert seen == [[[1, 2], [0, 1, 2], [], [0, 1, 2]]] * 2


@on_ranks("first_check_after_a_join", "torch", slow=("tensorflow", "jax"))
def test_a_process_that_has_joined_compares_weights_with_the_others_after_the_first_update(seen):
    assert seen == [["after the first step", "when fit() ended"]] * 2
