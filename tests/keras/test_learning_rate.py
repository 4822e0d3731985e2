"""The callbacks set the documented rates on every rank."""

import pytest

from tests.keras.launches import on_ranks


@on_ranks("warm_up", "torch", "jax", slow=("tensorflow",))
def test_warm_up_rises_with_every_step_and_restarts_in_the_next_fit(seen):
    for found in seen:
        assert found["rates"] == pytest.approx([0.1 + 0.1 * step / 8 for step in range(8)] + [0.2] * 4 + [0.02] * 4)
        assert found["again"] == pytest.approx([0.1, 0.125, 0.15, 0.175] + [0.2] * 4)


@on_ranks("warm_up_of_a_schedule", "torch", "jax", slow=("tensorflow",))
def test_warm_up_of_a_schedule(seen):
    for found in seen:
        assert found["rates"] == pytest.approx(found["expected"])


@on_ranks("warm_up_then_plateau", "torch", slow=("tensorflow", "jax"))
def test_reduction_on_a_plateau_persists(seen):
    for found in seen:
        assert found == pytest.approx([1.75, 2.0, 1.0, 0.5, 0.25])


@on_ranks("warm_up_resumed", "torch", slow=("tensorflow", "jax"))
def test_warm_up_resumes_where_it_was_saved(seen):
    for found in seen:
        assert found == pytest.approx([0.15 + 0.1 * step / 16 for step in range(8)] + [0.2] * 4)


@on_ranks("rates_for_one_process", "torch", slow=("tensorflow", "jax"))
def test_what_a_script_or_a_file_gives_is_the_rate_for_one_process(seen):
    expected = {"first": 0.2, "second": 0.2, "kept": 0.2, "file": 0.1, "loaded": 0.2, "resumed": 0.2, "velocities": 2.0}
    expected |= {"set": 0.1, "plateau": 0.05, "after plateau": 0.05, "copied": 0.025, "velocities after fit": 1.0}
    for found in seen:
        assert found == pytest.approx(expected, rel=1e-4)


@on_ranks("rates_between_fits", "torch", slow=("tensorflow", "jax"))
def test_between_fits_the_optimizer_holds_the_rate_for_one_process(seen):
    expected = {"fit": 0.2, "read": 0.2, "variable": 0.1, "before reduction": 0.2, "reduced": 0.1, "halved": 0.05}
    expected |= {"set": 0.1, "after set": 0.2, "after assign": 0.4, "loaded": 0.4, "after load": 0.8, "copied": 0.4}
    expected |= {"after copy": 0.8, "without warm-up": 0.4, "after an exception": 0.1}
    for rank, found in enumerate(seen):
        assert found.pop("said") == (rank == 0)
        assert found == pytest.approx(expected, rel=1e-4)


@on_ranks("multiples_in_a_range_of_epochs", "torch", slow=("tensorflow", "jax"))
def test_multiples_in_a_range_of_epochs(seen):
    expected = [1.0] * 4 + [0.5 ** (1 + step / 4) for step in range(4)] + [0.5**1.75] * 4
    for found in seen:
        assert found["rates"] == pytest.approx([0.1 * 2**0.5 * multiple for multiple in expected])
        assert found["written"], "write_on_root_only=False"


@on_ranks("momentum_correction", "torch", "jax", slow=("tensorflow",))
def test_momentum_correction(seen):
    for found in seen:
        assert found["found"] == pytest.approx(found["expected"], abs=1e-6)


@on_ranks("two_callbacks_on_a_schedule", "torch", "jax", slow=("tensorflow",))
def test_two_callbacks_multiply_a_schedule_and_fit_leaves_it_as_it_was(seen):
    for found in seen:
        multipliers = [2.0] * 3 + [0.2] * 5  # read after the update, of the next one
        multiplied = [a * b for a, b in zip(found["expected"], multipliers, strict=False)]
        assert found["rates"] == pytest.approx(multiplied)
        assert found["after"] == pytest.approx(found["expected"][8:])


@on_ranks("effective_rate", "torch")
def test_the_rate_is_said_once_with_a_warning_where_it_may_be_multiplied_twice(seen):
    (first, second), others = seen
    assert first == ["learning rate: 0.1 for one process, 0.2 for 2 ranks after warm-up"]
    assert len(second) == 1 and second[0].startswith(first[0] + ". This script also reads ring_plugins.size()")
    assert others == [[], []]


@on_ranks("wrong_arguments", "torch")
def test_arguments_that_are_no_rates_or_epochs_are_rejected_by_name(seen):
    names = ["multiplier"] * 5 + ["start_epoch", "steps_per_epoch"] + ["initial_learning_rate"] * 3 + ["warmup_epochs"]
    for *errors, returned in seen:
        begins = [error.partition("=")[0] for error in errors]
        assert begins == [f"ArgumentError: {name}" for name in names], errors
        assert returned.startswith("ArgumentError: the multiplier of LearningRateScheduleCallback returned None for")


@on_ranks("resumed_schedules", "torch")
def test_a_schedule_that_another_number_of_ranks_has_counted_is_told_with_the_numbers(seen):
    (same, (text,), new), others = seen
    assert same == new == [] and others == [[], [], []]
    assert "goes on at step 16, and epoch 3 of this fit() begins with step 8, at 4 steps an epoch" in text
