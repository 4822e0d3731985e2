"""Groups on several ranks: disjoint ones at once, overlapping ones in turn, of one, in another order, and refusals."""

import os

import numpy as np
import pytest

import ring_plugins as ring
from tests.checks import run

ring.init(ranks=int(os.environ["TEST_RANKS"]))
RANK, SIZE = ring.rank(), ring.size()
X = np.full(3, RANK + 1.0)


def total(ranks):
    return [float(sum(rank + 1 for rank in ranks))] * 3


def disjoint_groups_are_made_at_once_and_their_members_combine():
    mine = ring.Group(range(RANK % 2, SIZE, 2))  # no other rank's group is named here
    assert (mine.rank, mine.size, mine.ranks) == (RANK // 2, len(mine.ranks), tuple(range(RANK % 2, SIZE, 2)))
    assert RANK in mine and (RANK + 1) % 2 not in mine.ranks
    for _ in range(3):
        assert ring.all_reduce(X, ring.SUM, group=mine).tolist() == total(mine.ranks)
        assert ring.all_reduce(X, ring.SUM).tolist() == total(range(SIZE))
    assert ring.all_gather_object(RANK, group=mine) == [*mine.ranks]
    work = ring.all_gather(X[: mine.rank], wait=False, group=mine)
    assert work.wait().tolist() == [rank + 1.0 for place, rank in enumerate(mine.ranks) for _ in range(min(place, 3))]
    mine.close()
    with pytest.raises(ring.RingError, match=f"rank {RANK} uses the group of ranks? .* after it has been closed"):
        ring.barrier(group=mine)


def the_root_is_a_rank_of_the_job():
    mine = ring.Group(range(RANK % 2, SIZE, 2))
    last, other = mine.ranks[-1], (RANK + 1) % 2
    assert ring.broadcast(X, last, group=mine).tolist() == [last + 1.0] * 3
    assert ring.broadcast_object(RANK, last, group=mine) == last
    with pytest.raises(ring.ArgumentError, match=rf"root={other} is not in the group of ranks? {RANK % 2}"):
        ring.broadcast(X, other, group=mine)
    assert ring.broadcast(X, last, group=mine).tolist() == [last + 1.0] * 3  # the refusal has broken nothing


def overlapping_groups_take_turns():
    pairs = [ring.Group(sorted({rank, (rank + 1) % SIZE})) for rank in range(SIZE)]
    for turn in range(3):
        for pair in pairs:
            if RANK in pair:
                assert ring.all_reduce(X, ring.SUM, group=pair).tolist() == total(pair.ranks), (turn, pair)


def a_rank_outside_is_refused_at_once():
    others = [rank for rank in range(SIZE) if rank != RANK]
    group = ring.Group(others[:1])
    assert group.rank is None and RANK not in group
    for call in (ring.all_reduce, ring.broadcast, ring.all_gather, ring.reduce_scatter, ring.all_to_all):
        with pytest.raises(ring.ArgumentError, match=f"rank {RANK} is not in the group of rank {others[0]}"):
            call(X, group=group)
    with pytest.raises(ring.ArgumentError, match="is not in the group"):
        ring.barrier(group=group)
    ring.barrier()  # and has not disturbed the others


def a_group_of_one_is_the_identity():
    alone = ring.Group([RANK])
    assert (alone.rank, alone.size) == (0, 1)
    assert ring.all_reduce(X, group=alone).tolist() == X.tolist()


def a_group_may_have_all_ranks_and_any_order():
    every, reverse = ring.Group(range(SIZE)), ring.Group(range(SIZE - 1, -1, -1))
    assert ring.all_gather_object(RANK, group=every) == [*range(SIZE)]
    assert reverse.rank == SIZE - 1 - RANK
    assert ring.all_gather(X[:1], group=reverse).tolist() == [rank + 1.0 for rank in reverse.ranks]
    parts = ring.reduce_scatter(np.arange(float(SIZE)), ring.SUM, group=reverse)
    assert parts.tolist() == [float(reverse.rank * SIZE)]
    sent = ring.all_to_all(np.arange(float(SIZE)) + 10 * RANK, group=reverse)
    assert sent.tolist() == [reverse.rank + 10.0 * rank for rank in reverse.ranks]


def a_split_makes_a_group_of_each_color_in_the_order_of_keys():
    mine = ring.Group.split("low" if RANK < 2 else "high", -RANK)
    assert mine.ranks == ((1, 0) if RANK < 2 else tuple(range(SIZE - 1, 1, -1)))
    assert ring.all_reduce(X, ring.SUM, group=mine).tolist() == total(mine.ranks)
    alone = ring.Group.split(mine.rank, group=mine)
    assert alone.ranks == (RANK,)
    nobody = ring.Group.split(0 if RANK == 0 else None)
    assert (nobody.size, nobody.rank) == ((1, 0) if RANK == 0 else (0, None))


def further_communicators_are_made_within_the_group():
    mine = ring.Group(range(RANK % 2, SIZE, 2))
    further = mine.new_communicator("gradients")
    assert further.name == f"gradients of {mine.name}"
    assert further.all_gather_object(RANK) == [*mine.ranks]


def a_set_is_sorted():
    apart = [0, 8] if RANK % 2 else [8, 0]  # in one set these two collide, so the first comes first
    assert ring.Group({rank % SIZE for rank in apart} | {1}).ranks == tuple(sorted({0, 8 % SIZE, 1}))


def a_forked_process_makes_none():
    child = os.fork()
    if child == 0:
        try:
            ring.Group(range(SIZE))
        except ring.RingError as error:
            os._exit(int(f"this process was forked from rank {RANK}" not in str(error)))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def different_groups_are_a_deadlock_that_names_both():
    if RANK < 2:
        with pytest.raises(ring.DeadlockError, match=r"rank [01] waits for rank .* in the construction of group of"):
            ring.Group([0, 1] if RANK == 0 else [0, 1, *range(2, SIZE)][:3])
    ring.barrier()


if __name__ == "__main__":
    checks = [
        disjoint_groups_are_made_at_once_and_their_members_combine,
        the_root_is_a_rank_of_the_job,
        overlapping_groups_take_turns,
        a_rank_outside_is_refused_at_once,
        a_group_of_one_is_the_identity,
        a_group_may_have_all_ranks_and_any_order,
        a_split_makes_a_group_of_each_color_in_the_order_of_keys,
        further_communicators_are_made_within_the_group,
        a_set_is_sorted,
        a_forked_process_makes_none,
    ]
    run(checks)
    if os.environ.get("TEST_DEADLOCK"):
        run([different_groups_are_a_deadlock_that_names_both])
