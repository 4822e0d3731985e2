"""Ranks that differ get an error that names the difference; a rank that stops, stops all."""

import pytest

from tests.keras.launches import on_ranks


@on_ranks("one_rank_stops", "torch", slow=("tensorflow", "jax"))
def test_one_rank_stops_all_at_the_same_step(seen):
    assert seen == [{"steps": 6, "epochs": 2}] * 2


@on_ranks("rejections", "torch", slow=("tensorflow", "jax"))
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("steps", ("MismatchError", "rank 0: 4", "rank 1: 2", "steps_per_epoch")),
        ("models", ("MismatchError", "(5, 4)", "(5, 5)", "rank 1")),
        ("root", ("ArgumentError", "root_rank=7")),
        ("policy", ("ArgumentError", "moving_statistics='sum'")),
        ("optimizer", ("ArgumentError", "optimizer=str")),
        ("data", ("ArgumentError", "data=int")),
        ("no reduction", ("RingError", "without averaging", "DistributedOptimizer")),
    ],
)
def test_rejected(what, words, seen):
    for found in seen:
        assert all(word in found[what] for word in words), found[what]


@on_ranks("rejection_of_a_distribution", "torch", slow=("tensorflow", "jax"))
def test_rejected_beside_a_distribution(seen):
    for found in seen:
        assert found.startswith("ArgumentError") and "DataParallel" in found and "set_distribution(None)" in found


@on_ranks("rates_that_differ", "torch", slow=("tensorflow", "jax"))
def test_rates_that_differ_are_an_error(seen):
    for found in seen:
        assert "MismatchError" in found and "(rank 0: 0.1, rank 1: 0.05)" in found and "MetricAverageCallback" in found


@on_ranks("rates_that_differ_later", "torch", slow=("tensorflow", "jax"))
def test_rates_that_one_rank_changes_between_its_steps_are_an_error(seen):
    for found in seen:
        assert found["equal"] == "none"
        for what in ("differs", "differs, accumulating"):
            assert "differ among ranks (rank 0: " in found[what], found[what]
            assert "0.05" in found[what] and "0.01" in found[what], found[what]


@on_ranks("unequal_steps_of_a_generator", "torch", slow=("tensorflow", "jax"))
def test_unequal_steps_of_a_generator(seen):
    for rank, errors in enumerate(seen):
        for error, shorter in zip(errors, (0, 1, 0), strict=True):
            assert error.startswith("MismatchError: epochs differ in length among ranks: this rank "), error
            assert ("is in step 4 of its epoch" in error) == (rank != shorter), error
            assert "unequal numbers of batches" in error


@on_ranks("weights_that_a_callback_sets", "torch", slow=("tensorflow", "jax"))
def test_weights_are_compared_when_fit_ends(seen):
    for found in seen:
        for what in ("restored", "set"):
            assert found[what].startswith(
                "DriftError: when fit() ended the weights of rank 0 differ from those of rank 1"
            )
            assert "add MetricAverageCallback()" in found[what]
        assert "EarlyStopping.best_epoch (rank 0: " in found["restored"]
        assert found["averaged"] == found["plain"] == found["moving averages"] == "none"
    assert len(seen[0]["said"]) == 1 and "EarlyStopping.best_epoch" in seen[0]["said"][0]
    assert seen[1]["said"] == []


@on_ranks("rejection_of_a_strategy", "tensorflow")
def test_a_model_created_under_a_strategy_is_rejected(seen):
    for found in seen:
        assert found.startswith("ArgumentError") and "MirroredStrategy" in found


@on_ranks("rejection_of_ddp", "torch")
def test_a_model_that_keras_wrapped_in_ddp_is_rejected(seen):
    for found in seen:
        assert found.startswith("ArgumentError") and "DistributedDataParallel" in found


@on_ranks("warnings_of_gpu_copies", "torch")
def test_a_warning_names_the_cost_of_copies_from_gpus(seen):
    found, on_another_rank = seen
    assert "RING_TENSORFLOW_NCCL=1" in found["tensorflow"]
    assert "keras.distribution.DataParallel" in found["jax"]
    assert "RING_JAX_NCCL=1" in found["jax"] and found["compressed"] == found["jax"]
    assert found["tensorflow by NCCL"] == found["jax by NCCL"] == found["torch"] == ""
    assert set(on_another_rank.values()) == {""}


@on_ranks("arguments_of_fit_that_differ", "torch")
def test_arguments_of_fit_that_differ_are_told_by_their_names(seen):
    for found in seen:
        assert "numbers of epochs (rank 0: 1, rank 1: 2). Pass the same epochs to fit()" in found["epochs"]
        assert found["validation"].startswith("MismatchError: MetricAverageCallback"), found
        assert "rank 1: no validation_data" in found["validation"]
        assert "the model has no metric 'val_loss'. It has 'loss'" in found["name"]
        assert found["without metrics"] == found["NaN"] == found["name of train_step"] == "none"
