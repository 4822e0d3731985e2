"""The table of what a rank knows of the ends of the others."""

import time

from ring_plugins.core.base.facts import Facts


def test_the_way_on_which_a_departure_is_proven_first_decides_when_nothing_more_can_arrive():
    facts, began = Facts(), time.monotonic()
    facts.depart(1, 2.0)
    assert facts.departed[1] >= began + 2.0
    facts.depart(1, 0.0)
    first = facts.departed[1]
    assert began <= first <= time.monotonic()
    facts.depart(1, 2.0)
    assert facts.departed == {1: first}
