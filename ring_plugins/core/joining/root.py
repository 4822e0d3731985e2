"""A broadcast root that survives renumbering: several broadcasts in a row take from one process.

When a rank is lost, those above it get other numbers. A loop that broadcasts one tensor after the other from a fixed
number would then take some from one process and the rest from another, and all ranks would have the same wrong values.
So such a loop keeps to one process, and asks for its present number before each broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.world import current

#: No rank.
_UNKNOWN = -1


class Root:
    """A rank that stays the same process; if it is lost, the lowest of those that are left.

    A broadcast in which the root is lost raises. So nobody goes on with a part of what it had.

    Args:
        rank: as the script numbers the ranks now.
    """

    def __init__(self, rank: int) -> None:
        #: A process that takes the place of a lost rank hears of it when it joins.
        self.world_rank = _UNKNOWN if current().is_joining else current().world_ranks[rank]

    def is_here(self) -> bool:
        """Whether it is this process now."""
        world = current()
        return not world.is_joining and self._among(world.world_ranks) == world.world_rank

    def rank_in(self, communicator: Communicator[Any]) -> int:
        """Its rank in a communicator now."""
        return communicator.ranks.index(self._among(communicator.ranks))

    def _among(self, ranks: Sequence[int]) -> int:
        return self.world_rank if self.world_rank in ranks else ranks[0]
