"""Which rank updates what: every element belongs to exactly one rank, and ranks have equal shares."""

import numpy as np
import pytest

from ring_plugins.core.gradients.fusion import Entry, FusionPlan
from ring_plugins.core.gradients.slices import ROUND_SIZES, SliceGather, UpdateComparison, plan_rounds
from tests.core.collectives.thread_ranks import on_thread_ranks

SIZES = [(700_000, "float32"), (3, "float32"), (0, "float32"), (1, "float64"), (150_001, "float16"), (40, "float64")]
ENTRIES = [Entry(f"p{i}", dtype, count) for i, (count, dtype) in enumerate(SIZES * 5)]


@pytest.mark.parametrize("whole_tensors", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_every_element_belongs_to_one_rank(size, whole_tensors):
    rounds = plan_rounds(FusionPlan(ENTRIES, ROUND_SIZES), size, whole_tensors)
    ranges = {}
    for one in rounds:
        assert len({ENTRIES[i].dtype for i in one.entries}) == 1
        end = 0
        for rank, pieces in enumerate(one.pieces):
            assert sum(piece.stop - piece.start for piece in pieces) == one.counts[rank]
            for piece in pieces:
                assert piece.stop == piece.start or piece.offset == end  # in the order of the ranks, without gaps
                end += piece.stop - piece.start
                ranges.setdefault(piece.entry, []).append((piece.start, piece.stop))
        assert end == one.count == sum(ENTRIES[i].count for i in one.entries)
    for i, entry in enumerate(ENTRIES):
        starts, stops = zip(*sorted(ranges[i]), strict=True)
        assert starts == (0, *stops[:-1]) and stops[-1] == entry.count
        assert len(starts) == 1 or not whole_tensors


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_have_equal_shares(size):
    for whole_tensors, allowed in ((False, 1.001), (True, 1.15)):
        rounds = plan_rounds(FusionPlan(ENTRIES, ROUND_SIZES), size, whole_tensors)
        width = {"float16": 2, "float32": 4, "float64": 8}
        widths = [width[ENTRIES[one.entries[0]].dtype] for one in rounds]
        nbytes = [sum(one.counts[rank] * w for one, w in zip(rounds, widths, strict=True)) for rank in range(size)]
        assert max(nbytes) < allowed * sum(nbytes) / size


def test_large_tensors_are_cut_where_they_lie_and_small_ones_share_a_round():
    rounds = plan_rounds(FusionPlan(ENTRIES[:4], ROUND_SIZES), 2)
    assert [(one.is_direct, one.entries) for one in rounds] == [(False, (3,)), (True, (0,)), (False, (2, 1))]
    assert rounds[1].counts == (350_000, 350_000)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_has_to_stay_together_is_not_cut(size):
    grains = [1000 if entry.count == 700_000 else 7 if entry.count == 40 else 1 for entry in ENTRIES]
    rounds = plan_rounds(FusionPlan(ENTRIES, ROUND_SIZES), size, grains=grains)
    found = dict.fromkeys(range(len(ENTRIES)), 0)
    for one in rounds:
        for rank, pieces in enumerate(one.pieces):
            assert sum(piece.stop - piece.start for piece in pieces) == one.counts[rank]
            for piece in pieces:
                assert piece.start % grains[piece.entry] == 0
                assert piece.stop in (
                    ENTRIES[piece.entry].count,
                    piece.stop // grains[piece.entry] * grains[piece.entry],
                )
                found[piece.entry] += piece.stop - piece.start
        if one.is_direct:
            assert max(one.counts) - min(one.counts) <= 2000
    assert [found[i] for i in range(len(ENTRIES))] == [entry.count for entry in ENTRIES]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("whole_tensors", [False, True])
def test_every_rank_gets_the_slices_of_all(whole_tensors, in_place):
    entries = ENTRIES[:6]

    def rank_of(rank, communicator):
        plan = FusionPlan(entries, ROUND_SIZES)
        rounds = plan_rounds(plan, communicator.size, whole_tensors)
        gather = SliceGather(plan, rounds, communicator, in_place)
        wholes = {i: np.zeros(entry.count, entry.dtype) for i, entry in enumerate(entries)}
        for number, one in enumerate(rounds):
            own = {p.entry: (np.arange(p.start, p.stop) % 99).astype(entries[p.entry].dtype) for p in one.pieces[rank]}
            for piece in one.pieces[rank] if in_place else ():
                wholes[piece.entry][piece.start : piece.stop] = own[piece.entry]
                own[piece.entry] = wholes[piece.entry][piece.start : piece.stop]
            gather.run(number, one.entries, wholes, own)
        return all(np.array_equal(whole, (np.arange(whole.size) % 99).astype(whole.dtype)) for whole in wholes.values())

    assert on_thread_ranks(3, rank_of) == [True] * 3


def test_updates_that_differ_are_explained_on_all_ranks():
    def rank_of(rank, communicator):
        comparison = UpdateComparison(communicator, "Do the same.")
        assert not comparison.differs(7)
        assert comparison.differs(7 + rank)
        assert comparison.explain({"rate": 0.1}) is None
        return str(comparison.explain({"steps": 3, "rate": rank / 2}))

    text = "a sharded update differs among the ranks: rate is [0.0, 0.5], in rank order. Do the same."
    assert on_thread_ranks(2, rank_of) == [text] * 2
