"""Ranks with different numbers of batches train to the end of the longest, as one process with all of them."""

import pytest

from tests.keras.launches import BACKENDS, case, on_ranks

EVERYWHERE = [case(backend, ranks, "uneven_data", slow=True) for backend in BACKENDS for ranks in (2, 3)]


def check(found):
    for kind, one in found.items():
        assert one["equal"], kind
        assert one["weights"] <= 1e-6, kind
        assert one["optimizer"] <= 1e-6, kind
        assert one["logs"] <= 3e-6, kind  # of float32 sums in another order


@pytest.mark.parametrize("seen", EVERYWHERE, indirect=True)
def test_ranks_with_fewer_batches_take_part_to_the_end_of_the_longest(seen):
    for found in seen:
        check(found)
        assert {one["steps"] for kind, one in found.items() if kind != "generator"} == {10}
        assert found["generator"]["steps"] == 5


@on_ranks("uneven_steps_of_other_kinds", slow=BACKENDS)
def test_whatever_a_step_calls_works_on_ranks_that_have_run_out(seen):
    for found in seen:
        check(found)


@pytest.mark.parametrize(
    "seen",
    [case(backend, ranks, "uneven_groups_of_steps", slow=True) for backend in BACKENDS for ranks in (2, 3)],
    indirect=True,
)
def test_steps_that_belong_together_are_those_of_one_process(seen):
    for found in seen:
        check(found)
        assert all(one["steps"] == one["steps alone"] for one in found.values())


@on_ranks("uneven_data_in_other_ways", slow=("torch",))
def test_options_of_fit_work_with_uneven_data_or_are_refused(seen):
    numbers = {
        "class weights": range(5),
        "steps_per_epoch": [*range(4)] * 3,
        "steps of a generator": range(5),
        "scaled": range(5),
        "validated": [*range(5), *range(5)],
        "kept": range(2),
        "one sample": [0, 0],
        "one sample, without averages": [0, 0],
    }
    for rank, found in enumerate(seen):
        for what, batches in numbers.items():
            assert found[what]["equal"], what
            assert found[what]["batches"] == list(batches), what
        assert ("does not call optimizer.scale_loss(loss)" if rank == 0 else "rank 0 could") in found["own step"]
        assert found["error"].startswith("MismatchError: ranks would take different numbers of steps"), found["error"]
        assert found["no such"].startswith("ArgumentError: uneven='pad'")


@on_ranks("the_same_samples", slow=BACKENDS)
def test_data_that_nothing_has_divided_is_noticed_once(seen):
    first, second = seen
    assert second == ["end of fit"] * 3
    assert [first[0], *first[2:]] == ["end of fit"] * 3
    assert first[1].startswith("ranks 0, 1 have the same samples, or equal gradients, in their first batch")


def test_samples_are_counted_in_batches_of_any_structure():
    """A train_step of the script's own may take more than x, y and weights, and numbers beside arrays."""
    import numpy as np

    from ring_plugins.keras.uneven import _first_array, batch_size_of

    x = np.zeros((3, 2))
    for batch in ((x, 1, 2, 3), {"a": np.float32(1), "x": x}, [1.0, (None, x)], x):
        assert _first_array(batch) is x
    assert _first_array((1.0, [2])) is None

    class Adapter:
        batch_size, _first_batches = None, [(1.0, x, x, x)]

    assert batch_size_of(Adapter(), iter(())) == 3


def test_where_ranks_cannot_be_joined_unequal_or_unknown_batches_are_refused_before_the_first_step():
    import numpy as np

    from ring_plugins.core.base.errors import MismatchError
    from ring_plugins.keras.shard import ShardedArrays, has_equal_parts, shard_iterable
    from ring_plugins.keras.uneven import UnevenData, _Ahead, _check_even, _knows_last_size, _last_size

    why = "a CallbackList of the script's own keeps fit() from being found"
    _check_even(why, [True, True], [4, None], [None, None], [0, 1])
    with pytest.raises(MismatchError, match=r"^rank 1: how many batches x has is not known .* and a CallbackList "):
        _check_even(why, [True, False], [4, 4], [None, None], [0, 1])
    with pytest.raises(MismatchError, match=r"^the last batches of an epoch differ in size .*rank 0: 2, rank 1: None"):
        _check_even(why, [True, True], [4, 4], [2, None], [0, 1])
    with pytest.raises(MismatchError, match=r"^batches differ in size .*rank 0: 8, rank 1: 4; None is unknown"):
        _check_even(why, [True, True], [8, 4], [None, None], [0, 1])

    class Adapter:
        partial_batch_size = 3

    assert _last_size(Adapter(), []) == 3
    assert not _knows_last_size(Adapter(), [])
    assert _knows_last_size(type("", (), {"_partial_batch_size": 0})(), np.zeros(3))
    parts = [ShardedArrays(np.zeros(9), 2, rank, 3, False, 0, "keep") for rank in range(3)]
    assert [_last_size(Adapter(), part) for part in parts] == [1, 1, 1]
    assert all(_knows_last_size(Adapter(), part) for part in parts)
    for accumulates, steps, full in ((False, 1, 4), (True, 1, None), (False, 2, None)):
        uneven = UnevenData.__new__(UnevenData)
        model = type("", (), {"steps_per_execution": steps})()
        vars(uneven).update(full=4, _weighs_before=accumulates, _model=model)
        assert uneven.full_of_single_steps == full  # with which steps may be divided anew while ranks are lost
    ahead = _Ahead(range(3))
    assert (ahead.count(2), next(ahead), ahead.count(5), list(ahead), ahead.count(1), ahead.last) == (
        *(2, 0, 2, [1, 2], 0, 2),
    )
    assert has_equal_parts(shard_iterable([1], 0, 2, False, lambda: None))
    assert not has_equal_parts(shard_iterable([1], 0, 2, True, lambda: None)) and not has_equal_parts(iter([1]))


def test_batches_count_by_their_samples_where_ranks_have_equally_many_of_other_sizes(monkeypatch):
    """With an optimizer that accumulates, or NCCL, which exchange nothing where all is known to be equal."""
    from types import SimpleNamespace

    import torch

    from ring_plugins.keras import uneven as module

    monkeypatch.setattr(module, "current", lambda: SimpleNamespace(is_joining=False))

    def full(sizes, lasts):
        told = [module._Told(4, size, 4, "", None, last, True, True) for size, last in zip(sizes, lasts, strict=True)]
        gathered = [(one, False, None) for one in told]
        communicator = SimpleNamespace(ranks=[0, 1], all_gather_object=lambda own, what: gathered)
        data = module.UnevenData.__new__(module.UnevenData)
        vars(data).update(_told=told[0], _communicator=communicator, _weighs_before=True, _shares=[], full=None)
        vars(data).update(_callback=SimpleNamespace(uneven="join", average_gradients=True))
        vars(data).update(_is_uneven=False, _replaces=False, _has_agreed=False)
        data.agree()
        return data.full

    assert full([4, 4], [None, None]) is None and full([4, 4], [2, 2]) is None
    assert full([8, 4], [None, None]) == 8 and full([4, 4], [2, None]) == 4

    def last(count, **options):
        loader = torch.utils.data.DataLoader(range(20), batch_size=4, sampler=range(count), **options)
        return module._last_size(SimpleNamespace(partial_batch_size=20 % 4, _dataloader=loader), loader)

    assert (last(10), last(12), last(10, drop_last=True)) == (2, None, None)


def test_gradients_that_are_accumulated_count_alike_where_ranks_may_be_lost_between(monkeypatch):
    from types import SimpleNamespace

    from ring_plugins.keras import uneven as module

    def why(recovers, passes):
        optimizers = [SimpleNamespace(gradient_accumulation_steps=passes)]
        monkeypatch.setattr(module, "current", lambda: SimpleNamespace(recovers=recovers))
        monkeypatch.setattr(module, "optimizers_of", lambda model: optimizers)
        return module._why_even(SimpleNamespace(uneven="join", average_gradients=True, _model=None))

    assert (why(False, 4), why(True, None), why(True, 1)) == ("", "", "")
    assert why(True, 4) == "a rank may be lost between the steps whose gradients are accumulated (on_failure)"
