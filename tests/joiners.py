"""Lets members wait until processes wait to join, so that a test knows when they do."""

import time

from ring_plugins.core.members.join_descriptors import joiners_here
from ring_plugins.core.world import current


def wait_for_joiners(missing: set[int], seconds: float) -> None:
    """Wait until processes wait for these slots, on several hosts for those of the own one; not longer than that."""
    world, end = current(), time.monotonic() + seconds
    elsewhere = {one.slot for one in world.members.of_slot if one.node != world.members.here.node}
    missing = missing - elsewhere
    places = world.own_slot
    assert places is not None

    def waiting() -> list[int]:
        here = [one.slot for one in joiners_here(places)]
        return here + [one.slot for one in places.remote_joiners()]

    while missing and not missing.issubset(waiting()) and time.monotonic() < end:
        time.sleep(0.005)
