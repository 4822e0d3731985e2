"""Reports changes of a job's ranks to the script's callbacks and to the log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ring_plugins.core.base.member import Members


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

    A loss is found in the middle of an operation, when the script can do nothing. So changes are queued. The callbacks
    run at the same place on all ranks: after that operation, or after the backward that it belongs to.

    Attributes:
        untold: changes that the callbacks have not been called for yet, oldest first.
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
        """Call them. A change that a collective of theirs finds is told after the present one."""
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


# For the log ----------------------------------------------------------------------------------------------------------


def who_is_gone(
    members: Members, lost: Sequence[int], left: Sequence[int], replaces: bool, seconds: float, shows_hosts: bool
) -> str:
    """The line that tells the user of ranks that are gone, and of the new numbers of the others.

    Args:
        members: have followed the change.
        lost: world ranks that died or cannot be reached.
        left: world ranks that left on SIGTERM.
        replaces: whether other processes take the places of lost ranks.
        seconds: that the agreement took.
        shows_hosts: whether to say where lost ranks were.
    """
    facts, gone = members.facts, [*lost, *left]
    silent = [rank for rank in lost if rank in facts.silent and rank not in facts.dead]
    dead = [rank for rank in lost if rank not in silent]
    how = {"died": dead, "cannot be reached any more": silent, "left on SIGTERM": left}
    line = "; ".join(f"{_named(of, members, shows_hosts and of is not left)} {end}" for end, of in how.items() if of)
    line += f"; the job goes on with {len(members.ranks)} of its {members.shards} ranks since "
    line += time.strftime("%H:%M:%S") + (f", after {seconds * 1e3:.0f} ms" if lost else "")
    is_one = len(gone) == 1
    if replaces and members.can_be_replaced(gone):
        line += ". Another process takes its place." if is_one else ". Other processes take their places."
    else:
        line += "."
    if moved := ", ".join(f"{old} is now {new}" for new, old in enumerate(members.ranks) if old != new):
        line += f" New numbers, while errors keep the old ones: rank {moved}."
    return line + (" Timelines end with rank 0, which collected them." if 0 in gone else "")


def who_joined(joined: Sequence[int], members: Members, seconds: float, ranks: int) -> str:
    """The line that tells the user of processes that have joined.

    Args:
        joined: world ranks.
        members: have followed the change.
        seconds: that joining took.
        ranks: the most ranks that the job had before; joiners with higher slots take nobody's place.
    """
    slots = {rank: members.known[rank].slot for rank in joined}
    who = " and ".join(
        f"{_named([rank], members)} {f'in the place of rank {slot}' if slot < ranks else 'as an added rank'}"
        for rank, slot in slots.items()
    )
    numbers = ", ".join(f"{old} is now {new}" for new, old in enumerate(members.ranks) if old != new)
    return (
        f"{who} joined; the job goes on with {len(members.ranks)} ranks since {time.strftime('%H:%M:%S')}, after "
        f"{seconds * 1e3:.0f} ms." + (f" Errors keep the old numbers: rank {numbers}." if numbers else "")
    )


def too_few_left(leaving: Sequence[int], left: Sequence[int], members: Members, min_ranks: int) -> str:
    """The line that tells the user that all ranks end, because too many were told to end."""
    return (
        f"{_named(leaving, members)} got SIGTERM. All ranks end after this step, since training cannot go on with "
        f"{len(left)} rank{'s' * (len(left) != 1)}: min_ranks={min_ranks}."
    )


def _named(ranks: Sequence[int], members: Members, shows_hosts: bool = False) -> str:
    of = [members.known[rank] for rank in ranks]
    return " and ".join(f"rank {one.rank} (process {one.pid}{f' on {one.host}' * shows_hosts})" for one in of)
