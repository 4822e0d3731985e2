"""`BroadcastCallback` broadcasts state, lets one rank write, and restores the model."""

import pytest

from tests.keras.launches import on_ranks


@on_ranks("state_of_another_root", "torch", "jax", slow=("tensorflow",))
def test_ranks_start_from_the_root_and_diverge_without_averaging(seen):
    first, second = seen
    assert first["before"] != second["before"]
    assert first["begins"] == second["begins"] == second["before"]
    assert first["after"] != second["after"]
    assert (first["written"], second["written"]) == (False, True)


@on_ranks("broadcasts_of_what_is_not_built", "torch", slow=("tensorflow", "jax"))
def test_models_that_are_not_built_are_not_broadcast_in_part(seen):
    first, second = seen
    assert first["weights"] == second["weights"]
    for found in seen:
        for error in found["rejected"]:
            assert error.startswith("ArgumentError: model=") and "dense" in error
            assert "Begin the model with keras.Input" in error


@on_ranks("seeds", "torch", slow=("tensorflow", "jax"))
def test_seeds_are_offset_once(seen):
    first, second = seen
    assert first["first"] == first["before"]
    assert first["first"][0] != second["first"][0]
    assert first["first"][1] == second["first"][1]
    assert first["second"] == first["middle"] and second["second"] == second["middle"]


@on_ranks("dropout_masks", "tensorflow", "torch", slow=("jax",))
def test_ranks_drop_different_units(seen):
    first, second = seen
    assert len({*first, *second}) == 4


@on_ranks("noise_without_a_seed", "tensorflow", "torch")
def test_ranks_draw_different_noise_where_no_seed_is_given(seen):
    for of_first, of_second in zip(*seen, strict=True):
        assert of_first != of_second


@on_ranks("moving_statistics", "torch", slow=("tensorflow", "jax"))
def test_moving_statistics(seen):
    first, second = seen
    assert first["average"] == second["average"] == first["written"]
    trained = (0, 1, 4, 5)
    for i, (mine, theirs, mean) in enumerate(zip(first["local"], second["local"], first["average"], strict=True)):
        if i in trained:
            assert mine == theirs
        else:
            assert mine != theirs
            assert mean == pytest.approx([(a + b) / 2 for a, b in zip(mine, theirs, strict=True)], abs=1e-6)


@on_ranks("files", "tensorflow", "torch", slow=("jax",))
def test_files_are_written_once_and_do_not_mention_this_package(seen):
    first, second = seen
    assert first["written"] == ["best.keras", "last.keras", "log.csv"]
    assert second["written"] == []
    assert first["mentions"] == []
    assert first["kind"] == second["kind"] == "Adam"


@on_ranks("backup_that_only_the_root_has", "torch", slow=("tensorflow", "jax"))
def test_a_backup_of_the_root_restores_all_ranks(seen):
    first, second = seen
    assert first["epochs"] == second["epochs"] == [0, 1, 2, 2, 3]
    assert first["weights"] == second["weights"]


@on_ranks("forgotten_broadcast", "torch", "jax", slow=("tensorflow",))
def test_a_forgotten_broadcast_callback_is_named_after_the_first_step(seen):
    for rank, found in enumerate(seen):
        error, _ = found["different"]
        assert error.startswith("DriftError: after the first step the weights of rank 0 differ from those of rank 1: ")
        assert "Add ring_plugins.keras.BroadcastCallback() to fit(callbacks=...) on all ranks" in error
        error, lines = found["equal"]
        assert error == "none"
        assert len(lines) == (rank == 0) and all(
            "each rank trains by itself. Add ring_plugins" in line for line in lines
        )
        assert found["averaged"] == found["not forgotten"] == ["none", []]


@on_ranks("forgotten_broadcast_of_an_own_optimizer", "torch", slow=("tensorflow", "jax"))
def test_a_forgotten_broadcast_is_named_where_the_optimizer_is_the_scripts_own(seen):
    for rank, (different, equal) in enumerate(seen):
        *lines, error = different
        found = [line for line in lines if "differ" in line]
        assert len(found) == (rank == 0), different
        assert "after 2 steps the weights" in error and "ring_plugins.keras.broadcast_variables(model)" in error
        assert all(
            line.startswith("after the first step the weights of rank 0 differ from those of rank 1: ")
            and "Add ring_plugins.keras.BroadcastCallback() to fit" in line
            for line in found
        )
        assert equal[-1] == "none" and not [line for line in equal if "differ" in line]
