"""Lets members wait until processes wait to join, so that a test knows when they do."""

import time

from ring_plugins.core.elastic.join_descriptors import joiners_here
from ring_plugins.core.rendezvous.spawn import slots
from ring_plugins.core.world import current


def wait_for_joiners(missing: set[int], seconds: float) -> None:
    """Wait until processes wait for these slots, on several hosts for those of the own one; not longer than that."""
    places, world, end = slots(), current(), time.monotonic() + seconds
    if places is None:
        here = world.processes.node_of_slot(world.shard[0])
        missing = {slot for slot in missing if world.processes.node_of_slot(slot) == here}

    def waiting() -> list[int]:
        if places is None:
            assert world.own_slot is not None
            here = [told["slot"] for *_, told in joiners_here(world.own_slot)]
            return here + [one["slot"] for one in world.own_slot.remote_joiners()]
        return [one.slot for one in places.waiting() if one.is_there()]

    while missing and not missing.issubset(waiting()) and time.monotonic() < end:
        time.sleep(0.005)
