"""How the script hears of changes."""

import pytest

from ring_plugins.core.members.changes import ChangeCallbacks, MembershipChange


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
