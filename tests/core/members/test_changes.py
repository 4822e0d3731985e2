"""How the script hears of changes."""

import pytest

from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.members.changes import (
    ChangeCallbacks,
    MembershipChange,
    too_few_left,
    who_is_gone,
    who_joined,
)


def test_changes_are_told_in_order_and_one_that_comes_meanwhile_after_that():
    callbacks, told = ChangeCallbacks(), []
    changes = [MembershipChange((3 - i,), 0, 4 - i, 0, 3 - i) for i in range(3)]

    def first(change):
        told.append(("first", change.size))
        if change is changes[0]:
            callbacks.untold.append(changes[2])  # found in a collective of this function, whose end tells it
            callbacks.tell()

    callbacks.add(first)
    callbacks.add(lambda change: told.append(("second", change.size)))
    callbacks.untold.extend(changes[:2])
    callbacks.tell()
    assert told == [(name, size) for size in (3, 2, 1) for name in ("first", "second")]
    callbacks.remove(first)
    callbacks.untold.append(changes[0])
    callbacks.tell()
    assert told[6:] == [("second", 3)]


def test_a_function_that_raises_hears_of_the_next_change():
    callbacks = ChangeCallbacks()
    callbacks.add(lambda change: 1 / (change.size - 1))
    callbacks.untold.append(MembershipChange((1,), 0, 2, 0, 1))
    with pytest.raises(ZeroDivisionError):
        callbacks.tell()
    callbacks.untold.append(MembershipChange((2,), 0, 3, 0, 2))
    callbacks.tell()
    assert not callbacks.untold


def left(*ranks, joined=None):
    """Those left of four ranks, two on each of two hosts, and who has joined in which slot."""
    four = [Member(rank, rank, "aabb"[rank], 10 + rank, node="aabb"[rank]) for rank in range(4)]
    members = Members(next((rank for rank in ranks if rank < 4), 0), four)
    members.add(Member(rank, slot, "a", 10 + rank, node="a") for rank, slot in (joined or {}).items())
    members.follow(ranks, 1)
    return members


def test_one_line_says_which_ranks_died_and_which_cannot_be_reached():
    members = left(1, 3)
    members.facts.silent |= {0, 2}
    members.facts.dead.add(0)
    line = who_is_gone(members, [0, 2], [], False, 6.0, True)
    assert line.startswith(
        "rank 0 (process 10 on a) died; rank 2 (process 12 on b) cannot be reached any more; the job"
    )


def test_one_line_says_who_was_lost_and_how_ranks_are_numbered_now():
    line = who_is_gone(left(1, 3), [0, 2], [], False, 0.0123, False)
    assert line.startswith("rank 0 (process 10) and rank 2 (process 12) died; the job goes on with 2 of its 4 ranks")
    assert line.partition(", after ")[2].startswith(
        "12 ms. New numbers, while errors keep the old ones: rank 1 is now 0"
    )
    assert "rank 1 is now 0, 3 is now 1." in line and "end with rank 0" in line
    assert "is now" not in who_is_gone(left(0, 1, 2), [3], [], False, 0.0, False)
    line = who_is_gone(left(0, 2, 3), [1], [], True, 0.0, False)
    assert "Another process takes its place." in line
    assert "process takes" not in who_is_gone(left(0, 1), [2, 3], [], True, 0.0, False)  # on a host without members


def test_one_line_says_who_left_or_why_all_end():
    line = who_is_gone(left(1, 3), [], [0, 2], False, 0.0123, True)
    assert line.startswith("rank 0 (process 10) and rank 2 (process 12) left on SIGTERM; the job goes on with 2 of its")
    assert "rank 1 is now 0, 3 is now 1." in line and " ms" not in line
    assert too_few_left([3], [1], left(1, 3), 2) == (
        "rank 3 (process 13) got SIGTERM. All ranks end after this step, since training cannot go on with 1 rank: "
        "min_ranks=2."
    )


def test_one_line_says_who_joined_and_where():
    line = who_joined([5], left(0, 5, 4, joined={5: 1, 4: 2}), 0.0123, 3)
    assert line.startswith("rank 5 (process 15) in the place of rank 1 joined; the job goes on with 3 ranks since")
    assert line.endswith("after 12 ms. Errors keep the old numbers: rank 5 is now 1, 4 is now 2.")
    line = who_joined([4, 2], left(0, 4, 2, joined={4: 1, 2: 2}), 0.0123, 2)
    assert line.startswith(
        "rank 4 (process 14) in the place of rank 1 and rank 2 (process 12) as an added rank joined;"
    )
