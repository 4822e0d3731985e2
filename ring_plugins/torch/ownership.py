"""Which averager owns a parameter. If it had two, one would read the gradient while the other averages it in place.

An averager claims the parameters that it trains when it makes buckets for them. The claim ends with `close()`, or when
the averager is gone. Hooks hold averagers weakly, so an averager that nobody refers to is gone at once, or when
Python's garbage collector finds it, which happens at a different time on each rank.

`optimizer = DistributedOptimizer(...)`, run twice, creates the newer averager while the older is still referenced. So a
conflict is no error yet. It becomes one when the newer averager is first used and the older is, after a garbage
collection, still alive on some rank. Until then the hooks of the older do nothing.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ring_plugins.core.base.errors import RingError, name_ranks
from ring_plugins.torch import changes

_claims: weakref.WeakSet[Claim] = weakref.WeakSet()
_order = itertools.count()


class Claim:
    """The parameters that one averager trains.

    Args:
        name: of the averager, for error texts.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._names: dict[int, str] = {}  # by identity: a parameter lives as long as an averager that trains it
        self._order = -1
        #: Whether a newer claim to some of these parameters has been made.
        self.is_superseded = False

    def take(self, parameters: Iterable[tuple[str, Any]]) -> None:
        """Claim these parameters too; this claim is then newer than all others."""
        self._names.update((id(parameter), name) for name, parameter in parameters)
        self._order = next(_order)
        _claims.add(self)
        for claim in self.older():
            claim.is_superseded = True
        changes.note()

    def drop(self) -> None:
        """Give all parameters up."""
        self._names.clear()
        _claims.discard(self)
        changes.note()

    def has(self, parameter: Any) -> bool:
        """Whether it is to this parameter, too."""
        return id(parameter) in self._names

    @property
    def is_dropped(self) -> bool:
        """Whether it has no parameters any more."""
        return not self._names

    def older(self) -> list[Claim]:
        """Older claims to some of these parameters."""
        return [claim for claim in self._rivals() if claim._order < self._order]

    def newer(self) -> list[Claim]:
        """Newer claims to some of these parameters."""
        return [claim for claim in self._rivals() if claim._order > self._order]

    @property
    def has_others(self) -> bool:
        """Whether there are claims besides this one, which has parameters."""
        return len(_claims) > 1

    def _rivals(self) -> list[Claim]:
        if len(_claims) < 2:
            return []
        return [
            claim for claim in list(_claims) if claim is not self and not claim._names.keys().isdisjoint(self._names)
        ]

    def conflict(self, rivals: Sequence[Claim]) -> str | None:
        """What this and the first of the rivals share, as text; None without rivals."""
        if not rivals:
            return None
        rival = rivals[0]
        shared = [name for parameter, name in self._names.items() if parameter in rival._names]
        more = f" and {len(shared) - 1} more parameters" if len(shared) > 1 else ""
        return f"{rival.name} and {self.name} both average {shared[0]}{more}"


def is_claimed(parameter: Any) -> bool:
    """Whether some averager trains a parameter."""
    return any(claim.has(parameter) for claim in list(_claims))


def still_there(rivals: Sequence[Claim]) -> list[Claim]:
    """Collect garbage, and return the claims that are left: those whose averagers are still referenced."""
    if rivals:
        gc.collect()
    return [claim for claim in rivals if not claim.is_dropped]


def rejection(conflicts: Sequence[str | None], ranks: Sequence[int]) -> RingError:
    """The error for parameters with two averagers.

    Args:
        conflicts: by rank, what `Claim.conflict` says there.
        ranks: the ranks' numbers.
    """
    where = [rank for rank, conflict in zip(ranks, conflicts, strict=True) if conflict]
    first = next(conflict for conflict in conflicts if conflict)
    return RingError(
        f"{first} ({name_ranks(where)}). A parameter has one averager: give all parameters to one optimizer, or "
        "close() the averager that is no longer needed, or drop the last reference to it."
    )
