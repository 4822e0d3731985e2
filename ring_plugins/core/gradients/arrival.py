"""In which order gradients become ready, learned from a first backward, so that buckets fill in that order.

A plan made from the model alone assumes that backward goes through its parameters from the last to the first. Models
that list their layers in another order than they use them, as many with several branches do, break that: a bucket then
waits for one early layer, and all buckets behind it wait, too. DistributedDataParallel rebuilds its buckets once, in
the order that the first backward had, and so do we.

Ranks may see different orders, for example where each takes another branch. Rank 0's counts for all, so plans stay
equal. A gradient that rank 0 did not see comes last: nothing else should wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ring_plugins.core.collectives.api import Communicator


class ArrivalOrder:
    """The order of gradients, by the positions of their parameters; the same on all ranks."""

    def __init__(self) -> None:
        self._known: list[int] = []

    def of(self, positions: Collection[int]) -> list[int] | None:
        """These positions, first arrival first; None as long as one of them was not among those learned."""
        wanted = set(positions)
        found = [position for position in self._known if position in wanted]
        return found if len(found) == len(wanted) else None

    def learn(self, positions: Collection[int], arrived: Sequence[int], communicator: Communicator[Any]) -> bool:
        """Learn from the backward that has just ended; collective.

        Args:
            positions: of all gradients that it might have had, equal on all ranks.
            arrived: of those that this rank had, first arrival first; may hold other positions, and some twice.
            communicator: among all ranks.

        Returns:
            Whether there was anything to learn: not if rank 0 had no gradient.
        """
        wanted = set(positions)
        mine = [position for position in dict.fromkeys(arrived) if position in wanted]
        first = communicator.broadcast_object(mine if communicator.rank == 0 else None, purpose="order of gradients")
        if not first:
            return False
        seen = set(first)
        late = sorted(wanted - seen, reverse=True)
        self._known = [*first, *late, *(position for position in self._known if position not in wanted)]
        return True
