"""How the script hears of changes of a job's ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class MembershipChange(NamedTuple):
    """How the ranks of a job changed, as `on_membership_change` tells it.

    Attributes:
        lost: the ranks that died, numbered as at the start of the job, as in error texts.
        rank_before: this process's rank before the change.
        size_before: the number of ranks before the change.
        rank: this process's rank after the change.
        size: the number of ranks after it. If several ranks died in one step, the next change may have come already.
        left: the ranks that left because they got SIGTERM, numbered as `lost`.
        joined: the ranks that joined, numbered likewise: beyond those of the start.
    """

    lost: tuple[int, ...]
    rank_before: int
    size_before: int
    rank: int
    size: int
    left: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()


class ChangeCallbacks:
    """The script's functions that are called when the ranks of a job have changed.

    A loss is found in the middle of an operation, when the script can do nothing. So changes are noted, and told when
    that operation, or the backward that it belongs to, is over: at the same place on all ranks.

    Attributes:
        untold: changes of which the script does not know, oldest first.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[MembershipChange], object]] = []
        self._is_telling = False
        self.untold: deque[MembershipChange] = deque()

    def add(self, callback: Callable[[MembershipChange], object]) -> None:
        """Call this at each change from now on, after those that were added before."""
        self._callbacks.append(callback)

    def remove(self, callback: Callable[[MembershipChange], object]) -> None:
        """Undo one `add`."""
        self._callbacks.remove(callback)

    def tell(self) -> None:
        """Call them. A change that is found while they run, in a collective of theirs, comes after that."""
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self.untold:
                change = self.untold.popleft()
                for callback in list(self._callbacks):
                    callback(change)
        finally:
            self._is_telling = False
