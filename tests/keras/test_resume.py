"""What is left of an epoch is read once, on as many ranks or on others; where that cannot be, a line says why."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from ring_plugins.keras.resume import Rest
from ring_plugins.keras.shard import Order, ShardedArrays


def items(order):
    return [int(item) for step in range(order.own_steps) for item in order.step(step)]


@pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (1, 4), (5, 2)])
def test_any_number_of_ranks_reads_what_is_left_of_an_order(before, after, remainder):
    count = 61
    orders = [Order(count, 3, rank, before, True, 7, remainder) for rank in range(before)]
    for order in orders:
        order.begin(4)
    had = [int(item) for order in orders for step in range(2) for item in order.step(step)]
    place = orders[0].behind(2)
    rest = [Order(count, 3, rank, after, True, 7, remainder) for rank in range(after)]
    assert all(order.resume(place) for order in rest)
    read = [item for order in rest if not order.is_empty for item in items(order)]
    if remainder == "keep":
        assert sorted(had + read) == list(range(count))
    else:
        left = sorted(set(range(count)) - set(had))
        assert set(left) >= set(read) - (set(had) if remainder == "pad" else set())
        assert (
            len(read) == (len(left) // (3 * after) if remainder == "drop" else -(-len(left) // (3 * after))) * 3 * after
        )
    whole = Order(count, 3, 0, after, True, 7, remainder)
    whole.begin(5)
    rest[0].set_epoch(rest[0].epoch + 1)
    assert items(whole) == items(rest[0]), "the next epoch is a whole one"


def test_an_order_that_has_nothing_left_goes_on_with_the_next_epoch():
    order = Order(10, 2, 0, 2, False, 0, "drop")
    assert order.resume({"count": 10, "seed": 0, "epoch": 3, "consumed": 8}) and (order.epoch, order.steps) == (4, 2)
    assert not order.resume({"count": 11, "seed": 0, "epoch": 3, "consumed": 8})


def iterator_of(batches, **options):
    """What `Rest` needs of Keras's iterator over the batches of an epoch."""
    found = SimpleNamespace(
        _num_batches=batches, steps_per_epoch=None, _steps_seen=0, data_adapter=SimpleNamespace(**options)
    )
    found._get_iterator = lambda: iter(range(batches))

    def steps():
        source = iter(found._get_iterator())
        for step in range(found._num_batches):
            yield step, step, source

    found._enumerate_iterator = steps
    return found


def told(ranks=2, batch=2, steps=5, **data):
    return {"epoch": 1, "batch": batch, "steps": steps, "ranks": ranks, "data": data}


def test_streams_go_on_behind_as_many_batches():
    iterator = iterator_of(5)
    rest = Rest(iterator, [])
    rest.plan(told(batches=2), 2, 5)
    assert (rest.own, rest.first, rest.problem) == (3, 2, "")
    rest.begin_epoch()
    assert [(step, next(source)) for step, _, source in iterator._enumerate_iterator()] == [(2, 2), (3, 3), (4, 4)]
    assert rest.place(3, False) == {"batches": 5}
    rest.begin_epoch()
    assert [step for step, *_ in iterator._enumerate_iterator()] == [*range(5)]
    assert rest.place(1, False) == {"batches": 1}
    assert Rest(iterator_of(5, batch_size=4), []).place(1, False) == {"batches": 1, "size": 4}


def test_a_divided_order_gets_the_numbers_of_the_steps_that_are_left():
    x = np.arange(24.0)
    before = ShardedArrays(x, 3, 0, 2, False, 0, "drop")._order
    data = ShardedArrays(x, 2, 1, 4, False, 0, "drop")
    iterator = iterator_of(len(data))
    rest = Rest(iterator, data)
    rest.plan(told(steps=4, **before.behind(2)), 4, len(data))
    assert (rest.own, rest.first) == (1, 2) and data._order.consumed == 0
    rest.begin_epoch()
    assert data[0].tolist() == [14, 15] and iterator._num_batches == 1


@pytest.mark.parametrize(
    ("place", "adapter", "words"),
    [
        (told(3, batches=2), {}, "list cannot be divided anew, and the backup is of 3 ranks, these are 2"),
        (told(batches=2), {"_shuffle": True}, "fit(shuffle=True) reads x in another order in each run"),
        (told(batches=2, size=4, **{"size here": 8}), {}, "batches of list have 8 samples, and 4 before, so the data"),
        (told(count=3, seed=0, epoch=1, consumed=2), {}, "list is other data than that of the backup"),
    ],
)
def test_data_that_cannot_go_on_begins_anew_and_says_why(place, adapter, words):
    iterator = iterator_of(5, **adapter)
    rest = Rest(iterator, [])
    rest.plan(place, 2, 5)
    assert rest.problem.startswith(words) and rest.own is None
    rest.begin_epoch()
    assert list(itertools.starmap(lambda step, *_: step, iterator._enumerate_iterator())) == [*range(5)]
