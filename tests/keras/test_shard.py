"""Every rank gets its own part of the data, and the same number of steps."""

import itertools

import pytest

from tests.keras.launches import on_ranks


@on_ranks("sharded_arrays", "torch", slow=("tensorflow", "jax"))
def test_arrays_are_divided(seen):
    first, second = seen
    assert first["steps"] == second["steps"] == 2
    epochs = [sorted(a + b) for a, b in zip(first["epochs"], second["epochs"], strict=True)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1], "always the same samples are left out"
    assert first["kept"] == second["kept"] == pytest.approx(1.0, rel=1e-6)


@on_ranks("global_batch", "torch", slow=("tensorflow", "jax"))
def test_steps_of_a_global_batch_are_those_of_one_process(seen):
    for rank, found in enumerate(seen):
        assert found["error"] < 1e-6
        none, fraction, odd, both, stream, recovers = found["errors"]
        for text, size in ((none, "0"), (fraction, "2.0")):
            assert f"shard(global_batch_size={size}) on rank {rank}: that is not a positive number" in text
        assert f"shard(global_batch_size=7) on rank {rank} is no multiple of the number of ranks, 2: take 6 or 8" in odd
        assert "also got batch_size=4" in both and "got data=generator" in stream
        assert 'with on_failure="replace": a process that takes a place' in recovers


@on_ranks("arrays_of_other_kinds", "torch", slow=("tensorflow", "jax"))
def test_rows_of_arrays_of_any_kind_are_taken_by_position(seen):
    (first, errors), (second, others) = seen
    for kind, one in first.items():
        assert one["same"] and second[kind]["same"], kind
        assert {*one["rows"], *second[kind]["rows"]} == {float(number) for number in range(1, 14)}, kind
    assert errors == others
    assert [error for error in errors if not error.startswith("ArgumentError: ")] == []
    assert "data is a tuple of float rather than of arrays" in errors[0]


@on_ranks("sharded_streams", "torch")
def test_batches_and_generators_are_divided(seen):
    first, second = seen
    epochs = [sorted(a + b) for a, b in zip(first["dataset"], second["dataset"], strict=True)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert first["dataset"][0] != first["dataset"][1]
    assert (first["padded"], second["padded"]) == ([0, 2, 4, 6], [1, 3, 5, 0])
    assert (first["generator"], second["generator"]) == ([0, 2, 4], [1, 3, 5])
    assert (first["kept"], second["kept"]) == ([0, 2, 4, 6], [1, 3, 5])
    assert (first["kept of a generator"], second["kept of a generator"]) == ([0, 2, 4, 6], [1, 3, 5])
    for what, word in (("pad", "remainder='pad'"), ("few", "3 elements"), ("lengths", "[8, 9]")):
        assert first[what].startswith("ArgumentError") and word in first[what]


@on_ranks("sharded_data_loader", "torch")
def test_a_data_loader_is_divided(seen):
    first, second = seen
    assert first["steps"] == 2
    epochs = [sorted(a + b) for a, b in zip(first["epochs"], second["epochs"], strict=True)]
    assert all(len(set(epoch)) == 12 for epoch in epochs)
    assert first["epochs"][0] != first["epochs"][1]
    assert sorted(first["plain"][0] + second["plain"][0]) == list(range(13))
    assert first["plain"][0] == first["plain"][1]


@on_ranks("sharded_tf_data", "tensorflow")
def test_tf_data_is_divided(seen):
    first, second = seen
    for one, other in zip(first["epochs"], second["epochs"], strict=True):
        assert len(one) == len(other) == 4 and len({*one, *other}) == 8
    assert first["epochs"][0] != first["epochs"][1]
    for what in ("known", "unknown", "pairs"):
        assert (first[what], second[what]) == ([0, 2, 4, 6], [1, 3, 5, 7])
    assert (first["kept"], second["kept"]) == ([0, 2, 4, 6, 8], [1, 3, 5, 7])
    assert first["seeded"] == "none"
    assert "without a seed" in first["unseeded"]
    assert first["other seed"].startswith("MismatchError") and first["global seed"].startswith("MismatchError")


@on_ranks("divided_twice", "torch")
def test_a_part_is_not_divided_again(seen):
    for errors in seen:
        kinds = ("ShardedArrays", "DataLoader", "generator")
        for kind, error in zip(kinds, errors, strict=True):
            assert error.startswith(f"ArgumentError: data={kind} was returned by shard(), so it is this rank's part")


@on_ranks("orders_after_a_restart", "torch", slow=("tensorflow", "jax"))
def test_after_a_restart_data_continue_with_the_order_of_that_epoch(seen):
    for found in seen:
        assert found["whole"] == found["parts"]
        assert len({tuple(order) for order in found["whole"]}) == 3


@on_ranks("orders_after_a_join", "torch")
def test_a_process_that_joins_goes_on_in_the_orders_of_the_others(seen):
    first, second = seen
    for one, other in zip(first["taken"], second["taken"], strict=True):
        assert sorted(one + other) == list(range(16))
    assert first["other data"].startswith("MismatchError: shard(): data has 16 elements and seed=0, and on the other")


@on_ranks("orders_with_initial_epoch", "torch", slow=("tensorflow", "jax"))
def test_a_fit_that_begins_with_a_later_epoch_trains_on_that_epochs_data(seen):
    for found in seen:
        for whole, _, resumed in found.values():
            assert len({tuple(epoch) for epoch in whole}) == 4
            assert resumed == whole
        assert all(parts == whole for kind, (whole, parts, _) in found.items() if kind != "inside")


@on_ranks("orders_with_steps_per_epoch", "torch", slow=("tensorflow", "jax"))
def test_short_epochs_go_on_in_an_order_until_all_samples_were_seen(seen):
    for found in seen:
        for kind, epochs in found.items():
            passes = [list(itertools.chain(*epochs[i : i + 3])) for i in (0, 3, 6)]
            assert [sorted(one) for one in passes] == [list(range(24))] * 3, kind
            assert len({tuple(one) for one in passes}) == 3, kind
