"""Which part of each variable a rank updates: the parts of all ranks are the whole, and files hold the whole."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.keras.slices import CutStore, SliceLayout, describe_gradient, gather_slot
from tests.core.collectives.thread_ranks import on_thread_ranks

SHAPES = ((7, 5), (64, 3), (1,), (0, 2), (), (13,))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("between_rows", [False, True])
def test_the_parts_of_all_ranks_are_the_whole(size, between_rows):
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES]
    layouts = [SliceLayout(variables, rank, size, between_rows) for rank in range(size)]
    for i, shape in enumerate(SHAPES):
        whole = np.arange(np.prod(shape, dtype=int), dtype="float32").reshape(shape)
        parts = [layout.cut(i, whole) for layout in layouts]
        assert np.array_equal(np.concatenate([part.reshape(-1) for part in parts]), whole.reshape(-1))
        assert [part.size for part in parts] == layouts[0].counts(i)
        assert [part.shape for part in parts] == [layout.shape(i) for layout in layouts]
        assert [layout.is_empty(i) for layout in layouts] == [part.size == 0 for part in parts]
        if between_rows and shape == (64, 3) and size < 5:  # 16 rows or more for each rank
            assert all(layout.rows(i) is not None for layout in layouts)


def test_the_slots_of_all_ranks_are_gathered_and_those_of_a_file_cut():
    variable = keras.Variable(np.zeros((3, 3), "float32"))
    whole = np.arange(9, dtype="float32").reshape(3, 3)

    def rank_of(rank, communicator):
        layout = SliceLayout([variable], rank, 2)
        slot = keras.Variable(layout.cut(0, whole))
        store = CutStore({"0": np.float32(3), "1": whole}, {"1": slot}, lambda slot, value: layout.cut(0, value))
        assert sorted(store.keys()) == ["0", "1"] and store["0"] == 3
        assert np.array_equal(store["1"], layout.cut(0, whole))
        return gather_slot(slot, variable, layout.counts(0), communicator)

    for found in on_thread_ranks(2, rank_of):
        assert np.array_equal(found, whole)


def test_a_variable_that_cannot_be_averaged_is_named():
    with pytest.raises(ArgumentError, match=r"has dtype=string, whose gradients cannot be averaged"):
        describe_gradient(0, SimpleNamespace(dtype="string", path="names", name="names", shape=(2,)))
