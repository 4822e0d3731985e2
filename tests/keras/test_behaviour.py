"""What the callbacks do on two ranks, beside making weights equal."""

from typing import Any

import pytest

from tests.keras.launches import launch

pytestmark = pytest.mark.timeout(900)  # the first test waits for everything that its launch looks at


def seen(name: str, backend: str) -> list[Any]:
    """What each rank saw."""
    found = launch(backend).values(name)
    assert len(found) == 2
    for value in found:
        assert "error" not in value, value["error"]
    return [value["value"] for value in found]


# Metrics -----------------------------------------------------------------------------------------------


def test_metrics_are_those_of_all_data(backend):
    for found in seen("metrics_of_uneven_shards", backend):
        assert found["evaluate"] == pytest.approx(found["expected"], rel=1e-6)
        assert found["validation"] == pytest.approx(found["expected"], rel=1e-6)
        assert found["local"]["auc"] != pytest.approx(found["expected"]["auc"], rel=1e-3)
        assert found["validations"] == 1
        assert found["history"] == found["seen"] == pytest.approx(found["expected"]["auc"], rel=1e-6)
        assert not found["left"], "the model's method was not put back"


def test_a_metric_that_is_no_sum_is_averaged_and_says_so(backend):
    first, second = seen("metric_that_is_no_sum", backend)
    assert first["largest"] == second["largest"] == pytest.approx(2.0)
    assert len(first["said"]) == 1 and "largest" in first["said"][0]
    assert second["said"] == []


# Learning rate -----------------------------------------------------------------------------------------


def test_warm_up_rises_with_every_step_and_begins_again(backend):
    for found in seen("warm_up", backend):
        assert found["rates"] == pytest.approx([0.1 + 0.1 * step / 8 for step in range(8)] + [0.2] * 4 + [0.02] * 4)
        assert found["again"] == pytest.approx([0.1, 0.125, 0.15, 0.175] + [0.2] * 4)


def test_warm_up_of_a_schedule(backend):
    for found in seen("warm_up_of_a_schedule", backend):
        assert found["rates"] == pytest.approx(found["expected"])


def test_reduction_on_a_plateau_keeps_its_effect(backend):
    for found in seen("warm_up_then_plateau", backend):
        assert found == pytest.approx([1.75, 2.0, 1.0, 0.5, 0.25])


def test_warm_up_goes_on_where_it_was_saved(backend):
    for found in seen("warm_up_resumed", backend):
        assert found == pytest.approx([0.15 + 0.1 * step / 16 for step in range(8)] + [0.2] * 4)


def test_multiples_in_a_range_of_epochs(backend):
    expected = [1.0] * 4 + [0.5 ** (1 + step / 4) for step in range(4)] + [0.5**1.75] * 4
    for found in seen("multiples_in_a_range_of_epochs", backend):
        assert found["rates"] == pytest.approx([0.1 * 2**0.5 * multiple for multiple in expected])
        assert found["written"], "write_on_root_only=False"


def test_momentum_correction(backend):
    for found in seen("momentum_correction", backend):
        assert found["found"] == pytest.approx(found["expected"], abs=1e-6)


def test_rates_that_part_are_an_error(backend):
    for found in seen("rates_that_part", backend):
        assert "MismatchError" in found and "[0.1" in found and "0.05" in found and "MetricAverageCallback" in found


# State and files ---------------------------------------------------------------------------------------


def test_everyone_starts_from_the_root_and_is_averaged_only_where_asked(backend):
    first, second = seen("state_of_another_root", backend)
    assert first["before"] != second["before"]
    assert first["begins"] == second["begins"] == second["before"]
    assert first["after"] != second["after"]
    assert (first["written"], second["written"]) == (False, True)


def test_seeds_are_offset_once(backend):
    first, second = seen("seeds", backend)
    assert first["first"] == first["before"]
    assert first["first"][0] != second["first"][0]
    assert first["first"][1] == second["first"][1]
    assert first["second"] == first["middle"] and second["second"] == second["middle"]


def test_ranks_drop_different_units(backend):
    first, second = seen("dropout_masks", backend)
    assert len({*first, *second}) == 4


def test_moving_statistics(backend):
    first, second = seen("moving_statistics", backend)
    assert first["average"] == second["average"] == first["written"]
    trained = (0, 1, 4, 5)
    for i, (mine, theirs, mean) in enumerate(zip(first["local"], second["local"], first["average"], strict=True)):
        if i in trained:
            assert mine == theirs
        else:
            assert mine != theirs
            assert mean == pytest.approx([(a + b) / 2 for a, b in zip(mine, theirs, strict=True)], abs=1e-6)


def test_files_are_written_once_and_know_nothing_of_this_package(backend):
    first, second = seen("files", backend)
    assert first["written"] == ["best.keras", "last.keras", "log.csv"]
    assert second["written"] == []
    assert first["mentions"] == []
    assert first["kind"] == second["kind"] == "Adam"


def test_a_backup_of_the_root_brings_everyone_back(backend):
    first, second = seen("backup_that_only_the_root_has", backend)
    assert first["epochs"] == second["epochs"] == [0, 1, 2, 2, 3]
    assert first["weights"] == second["weights"]


# Stopping and refusing -----------------------------------------------------------------------------------


def test_one_rank_stops_all_at_the_same_step(backend):
    assert seen("one_rank_stops", backend) == [{"steps": 6, "epochs": 2}] * 2


def test_a_fit_that_raises_is_undone_at_once(backend):
    first, second = seen("fit_that_raises", backend)
    for found in (first, second):
        assert found["error"] == "ValueError: not today"
        assert found["left"] == []
    assert first["apart"] != second["apart"]
    assert first["together"] == second["together"]


def test_accumulated_gradients_are_reduced_once_an_update(backend):
    first, second = seen("accumulation_is_reduced_once_an_update", backend)
    assert first == second
    assert first["updates"] == 2


@pytest.mark.parametrize("backend", ["tensorflow"])
def test_what_xla_cannot_compile_is_refused_or_not_compiled(backend):
    first, second = seen("inside_xla", backend)
    for found in (first, second):
        for text in (found["refused"], found["nested"]):
            assert "InsideXla: " in text and "outside of it" in text, text
        assert found["found"] == pytest.approx([-0.15] * 5)
        assert len(found["said"]) == 1 and "Adversarial.train_step" in found["said"][0]
    assert first["weights"] == second["weights"]


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
def test_refused(what, words, backend):
    for found in seen("refusals", backend):
        assert all(word in found[what] for word in words), found[what]


def test_unequal_steps_of_a_generator(backend):
    ended, longer = seen("unequal_steps_of_a_generator", backend)
    assert ended.startswith("MismatchError") and "after 3 steps" in ended and "as much data" in ended, ended
    assert "different numbers of steps" in longer or "as much data" in longer, longer


def test_refused_beside_a_distribution(backend):
    for found in seen("refusal_of_a_distribution", backend):
        assert found.startswith("ArgumentError") and "DataParallel" in found and "set_distribution(None)" in found


@pytest.mark.parametrize(
    ("backend", "name", "word"),
    [
        ("tensorflow", "refusal_of_a_strategy", "MirroredStrategy"),
        ("torch", "refusal_of_ddp", "DistributedDataParallel"),
    ],
)
def test_refused_beside_other_parallelism(backend, name, word):
    for found in seen(name, backend):
        assert found.startswith("ArgumentError") and word in found


# Steps of the user's own -------------------------------------------------------------------------------


def test_an_overflow_on_one_rank_lets_all_skip(backend):
    assert seen("overflow_on_one_rank", backend) == [{"unchanged": True, "scale": 8.0}] * 2


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_two_optimizers_in_one_step(backend):
    first, second = seen("adversarial_training", backend)
    assert first["together"] == second["together"]
    for alone, together in zip(first["alone"], first["together"], strict=True):
        flat = [[v for row in a for v in row] if isinstance(a[0], list) else a for a in (alone, together)]
        assert flat[1] == pytest.approx(flat[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("backend", ["jax"])
def test_two_optimizers_in_one_compiled_step(backend):
    for found in seen("two_optimizers_in_one_compiled_step", backend):
        assert found["found"] == pytest.approx(found["expected"], abs=1e-5)


def test_a_loop_of_ones_own(backend):
    for found in seen("own_loop", backend):
        assert found["found"] == pytest.approx(found["expected"])


@pytest.mark.parametrize("backend", ["torch"])
def test_gradients_that_no_hook_saw(backend):
    for found in seen("gradients_from_elsewhere", backend):
        assert found == pytest.approx([-0.3] * 5)


# Data --------------------------------------------------------------------------------------------------


def test_arrays_are_divided(backend):
    first, second = seen("sharded_arrays", backend)
    assert first["steps"] == second["steps"] == 2
    epochs = [sorted(a + b) for a, b in zip(first["epochs"], second["epochs"], strict=True)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1], "always the same samples are left out"
    assert first["kept"] == second["kept"] == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("backend", ["jax"])
def test_batches_and_generators_are_divided(backend):
    first, second = seen("sharded_streams", backend)
    epochs = [sorted(a + b) for a, b in zip(first["dataset"], second["dataset"], strict=True)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert first["dataset"][0] != first["dataset"][1]
    assert (first["padded"], second["padded"]) == ([0, 2, 4, 6], [1, 3, 5, 0])
    assert (first["generator"], second["generator"]) == ([0, 2, 4], [1, 3, 5])
    for what, word in (("keep", "remainder='keep'"), ("few", "3 elements"), ("lengths", "[8, 9]")):
        assert first[what].startswith("ArgumentError") and word in first[what]


@pytest.mark.parametrize("backend", ["torch"])
def test_a_data_loader_is_divided(backend):
    first, second = seen("sharded_data_loader", backend)
    assert first["steps"] == 2
    epochs = [sorted(a + b) for a, b in zip(first["epochs"], second["epochs"], strict=True)]
    assert all(len(set(epoch)) == 12 for epoch in epochs)
    assert first["epochs"][0] != first["epochs"][1]
    assert sorted(first["plain"][0] + second["plain"][0]) == list(range(13))
    assert first["plain"][0] == first["plain"][1]


@pytest.mark.parametrize("backend", ["tensorflow"])
def test_tf_data_is_divided(backend):
    first, second = seen("sharded_tf_data", backend)
    for one, other in zip(first["epochs"], second["epochs"], strict=True):
        assert len(one) == len(other) == 4 and len({*one, *other}) == 8
    assert first["epochs"][0] != first["epochs"][1]
    for what in ("known", "unknown", "pairs"):
        assert (first[what], second[what]) == ([0, 2, 4, 6], [1, 3, 5, 7])
    assert (first["kept"], second["kept"]) == ([0, 2, 4, 6, 8], [1, 3, 5, 7])
    assert first["seeded"] == "none"
    assert "without a seed" in first["unseeded"]
    assert first["other seed"].startswith("MismatchError") and first["global seed"].startswith("MismatchError")
