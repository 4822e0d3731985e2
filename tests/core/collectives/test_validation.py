import numpy as np
import pytest

from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.collectives.validation import (
    check_counts,
    check_rank,
    check_splits,
    exchange_rows,
    rows_of,
    scatter_rows,
)
from tests.launch import run_ranks


class Three(SingleCommunicator):
    """One of three ranks; the test gives the others' answers."""

    def __init__(self, *others):
        super().__init__("three")
        self.size, self.ranks, self.others = 3, (0, 1, 2), others

    def all_gather_object(self, item, purpose=""):
        return [item, *self.others]


@pytest.mark.parametrize("rank", [-1, 3, True, 1.0, "0"])
def test_an_invalid_rank_is_rejected_by_name(rank):
    with pytest.raises(ArgumentError, match=rf"root={rank!r} is not a rank of three, which has 3"):
        check_rank(rank, Three())


def test_a_rank_is_returned():
    assert check_rank(2, Three()) == 2
    assert type(check_rank(np.int64(2), Three())) is int  # as from np.argmax


@pytest.mark.parametrize("counts", [[1, 1], [4, -1], []])
def test_counts_must_cover_the_memory(counts):
    with pytest.raises(ArgumentError, match="do not add up to the 3 elements"):
        check_counts(counts, 3)


def test_a_0_d_array_has_no_rows():
    assert rows_of((4, 2), "all_to_all") == 4
    with pytest.raises(ArgumentError, match="x is 0-d; all_to_all needs at least one dimension"):
        rows_of((), "all_to_all")


@pytest.mark.parametrize(("rows", "parts"), [(7, [3, 2, 2]), (2, [1, 1, 0]), (0, [0, 0, 0])])
def test_the_first_parts_of_a_reduce_scatter_are_longer(rows, parts):
    assert scatter_rows(rows, 3) == parts


def test_splits_are_equal_by_default():
    assert check_splits(None, 6, 3) == [2, 2, 2]
    with pytest.raises(ArgumentError, match="7 rows, which 3 ranks cannot share equally"):
        check_splits(None, 7, 3)


@pytest.mark.parametrize("splits", [[1, 2], [3, 2, 2], [7, -1, 1]])
def test_splits_must_be_one_count_a_rank_that_add_up(splits):
    with pytest.raises(ArgumentError, match="splits="):
        check_splits(splits, 6 if len(splits) == 3 else 3, 3)


def test_rows_may_differ_among_ranks():
    three = Three(((5,), (2,), "float32"), ((0,), (2,), "float32"))
    assert exchange_rows(three, [4], (2,), "float32", "all_gather") == [(4,), (5,), (0,)]


@pytest.mark.parametrize("other", [((4,), (3,), "float32"), ((4,), (2,), "float64")])
def test_ranks_that_disagree_are_named(other):
    with pytest.raises(MismatchError, match=r"x of all_gather .* rank 0: \(\*, 2\) float32, rank 1: "):
        exchange_rows(Three(other, other), [4], (2,), "float32", "all_gather")


PAIRS = """
import itertools
import numpy as np
import torch
import ring_plugins as ring
import ring_plugins.torch

ring.init(ranks=2)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
calls = {
    "all_gather_object()": lambda: ring.all_gather_object("mine"),
    "all_gather()": lambda: ring.all_gather(np.ones(2)),
    "all_to_all()": lambda: ring.all_to_all(np.ones(2)),
    "ring_plugins.torch.all_gather()": lambda: ring.torch.all_gather(torch.ones(1)),
    "ring_plugins.torch.all_to_all()": lambda: ring.torch.all_to_all(torch.ones(2)),
    "broadcast_parameters()": lambda: ring.torch.broadcast_parameters(model),
    "new communicator for gradients()": lambda: ring.torch.GradientAverager(model),
    "broadcast_object(root 0)": lambda: ring.broadcast_object("mine"),
    "broadcast_optimizer_state(root 0)": lambda: ring.torch.broadcast_optimizer_state(optimizer),
    "all_gather() of one int64": lambda: ring.all_gather(torch.tensor([1])),
}
for (name, call), (other, theirs) in itertools.combinations(calls.items(), 2):
    try:
        print("in silence:", name, other, call() if ring.rank() == 0 else theirs())
    except ring.MismatchError as error:
        told = [each.partition("(")[0] + "(" for each in (name, other)]
        if "of all_gather" not in str(error) and not all(f"calls {each}" in str(error) for each in told):
            print("not told:", name, other, error)
print(f"{ring.rank()} done")
"""


def test_an_exchange_of_counts_or_of_objects_meets_none_of_another_operation():
    result = run_ranks(PAIRS, 2, timeout=120)
    assert result.output.count("done") == 2, result
    assert "in silence" not in result.output and "not told" not in result.output, result
