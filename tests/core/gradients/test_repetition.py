"""A rank may die at any point of a pass: all buckets are then averaged over the ranks that are left, or none is."""

import numpy as np
import pytest

from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.collectives.shm_group import SMALL_BYTES
from ring_plugins.core.gradients.fusion import BucketSizes, Entry, FusionBuffer, FusionPlan
from ring_plugins.core.gradients.reducer import GradientReducer
from ring_plugins.core.gradients.trials import Choice
from tests.core.collectives.mortal_ranks import on_mortal_ranks

#: A small bucket, one that members reduce in place in shared memory, and one with a tensor that is reduced where it is.
COUNTS = (30, SMALL_BYTES, 2 * SMALL_BYTES)
PLAN = FusionPlan(
    [Entry(str(i), "float32", count) for i, count in enumerate(COUNTS)], BucketSizes(64, 64, 4 * COUNTS[2]), control=1
)
#: Has exact averages over 1, 2 and 3 ranks.
UNIT = 6.0


def passes(rank, communicator, fails_in=(), overlap=False, between=lambda: None):
    """Run two passes; returns, for each, the values of all gradients and flags, and the control number.

    Args:
        rank: a `Rank`.
        communicator: of the gradients.
        fails_in: ranks that do so.
        overlap: whether buckets are averaged while gradients are still to come.
        between: called between two gradients.
    """
    buffer = FusionBuffer(PLAN, communicator)
    state = {"step": 0}

    def fill(bucket):
        memory = buffer.memories[bucket.index].array
        value = UNIT * 3**rank.rank * (1 + state["step"])
        memory[: bucket.flags] = value
        memory[bucket.flags :] = 1
        if bucket.index == len(PLAN.buckets) - 1:
            memory[bucket.flags + len(bucket.entries)] = UNIT if rank.rank in fails_in else 0
        direct = [HostMemory(np.full(COUNTS[i], value, np.float32), "float32") for i in bucket.direct]
        state.setdefault("direct", {}).update({bucket.index: direct})
        return direct

    reducer = GradientReducer(buffer, communicator, overlap=Choice(overlap))
    found = []
    for step in range(2):
        state["step"] = step
        if rank.rank in fails_in:
            reducer.begin()
            reducer.abandon(fill)
        else:
            # Ranks come to what is between two gradients with different buckets under way.
            for entry in (2, 1, 0) if rank.rank else (1, 2, 0):
                reducer.mark_ready(entry, fill)
                if entry:
                    between()
            reducer.finish(fill)
        values = set()
        for bucket in PLAN.buckets:
            array = buffer.memories[bucket.index].array
            values |= set(array[: bucket.flags].tolist())
            assert set(array[bucket.flags : bucket.flags + len(bucket.entries)].tolist()) == {1.0}
            for memory in state["direct"][bucket.index]:
                values |= set(memory.array.tolist())
        last = PLAN.buckets[-1]
        found.append((values, float(buffer.memories[-1].array[last.flags + len(last.entries)])))
    return found, reducer.passes


@pytest.mark.parametrize(
    ("overlap", "between", "fails_in"),
    [
        (False, False, ()),
        (True, False, ()),
        (True, True, ()),
        pytest.param(False, False, (1,), marks=pytest.mark.slow),
        pytest.param(True, False, (1,), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("how", ["before", "in"])
def test_each_pass_is_averaged_over_the_same_ranks_wherever_one_dies(
    monkeypatch, victim, how, overlap, between, fails_in
):
    number, died, orders = 0, True, set()
    while died:
        number += 1

        def run(rank, number=number):
            communicator, other = rank.communicator("gradients"), rank.communicator("of the script")
            FusionBuffer(PLAN, communicator)
            if rank.rank == victim:
                first = rank.barriers + 4  # after the buffer of `passes` has been allocated
                rank.dies = lambda at: how if at - first == number else None
            return passes(rank, communicator, fails_in, overlap, other.barrier if between else lambda: None)

        results = on_mortal_ranks(monkeypatch, 3, run)
        died = results[victim] is None
        left = [rank for rank in range(3) if rank != victim]
        assert results[left[0]] == results[left[1]]
        found, finished = results[left[0]]
        assert finished == 2
        over = []
        for step, (values, control) in enumerate(found):
            for ranks in ([0, 1, 2], left):
                if values == {UNIT * (1 + step) * sum(3**rank for rank in ranks) / len(ranks)}:
                    over.append(ranks)
                    assert control == UNIT * sum(rank in fails_in for rank in ranks) / len(ranks)
        assert len(over) == 2, (number, found)
        orders.add(tuple(map(len, over)))
    assert orders == {(2, 2), (3, 2), (3, 3)}
