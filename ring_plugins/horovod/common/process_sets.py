"""Horovod's process sets, each of which is a `ring_plugins.Group`.

Horovod adds and removes a set on all processes. Its number comes from the order of that, so it is the same on all.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.functions import all_or_none
from ring_plugins.core.groups import Group, group_readers
from ring_plugins.core.job import World
from ring_plugins.core.world import current

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some of the job's processes, for the argument `process_set` once it has been added.

    Args:
        ranks_or_comm: ranks, or an mpi4py communicator.

    Attributes:
        process_set_id: its number; None before it is added, and once it has been removed.
        ranks: in ascending order.
        group: makes its collectives; None for all processes.

    Raises:
        ArgumentError: it is neither.
    """

    process_set_id: int | None = None
    group: Group | None = None

    def __init__(self, ranks_or_comm: Any) -> None:
        self.mpi_comm = None if isinstance(ranks_or_comm, Iterable) else ranks_or_comm
        self.ranks = None if self.mpi_comm is not None else _ranks_of(ranks_or_comm)

    def included(self) -> bool | None:
        """Whether this process is one of them; None before the set is added."""
        return None if self.process_set_id is None else current().topology.rank in (self.ranks or ())

    def rank(self) -> int | None:
        """This process's number among them, None outside. `root_rank` is a rank of the job, also with a set."""
        return None if self.group is None else self.group.rank

    def size(self) -> int | None:
        """Number of its processes; None before it is added."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """All processes, as many as there are at the moment."""

    process_set_id = 0

    def __init__(self) -> None:
        self.mpi_comm = None

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        return list(range(current().topology.size))

    def rank(self) -> int:
        return current().topology.rank


global_process_set = _GlobalProcessSet()
#: Of each job, its sets by their numbers, and the next number.
_sets: weakref.WeakKeyDictionary[World, tuple[dict[int, ProcessSet], itertools.count[int]]] = (
    weakref.WeakKeyDictionary()
)


@all_or_none
def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Let a set be used; collective among all ranks, which add equal sets.

    Args:
        process_set: a `ProcessSet`, or its ranks.

    Raises:
        ArgumentError: a set of the same ranks has been added already, or they are not ranks of the job.
        MismatchError: ranks add different sets.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    sets, numbers = _sets.setdefault(current(), ({}, itertools.count(1)))
    ranks = sorted(ranks_of_comm(added.mpi_comm)) if added.ranks is None else added.ranks
    by_rank = current().communicator.all_gather_object(ranks, "hvd.add_process_set")
    if any(theirs != ranks for theirs in by_rank):
        raise MismatchError(f"the ranks add different process sets: {by_rank} in rank order. All add each set.")
    if added.process_set_id is not None or any(ranks == other.ranks for other in [*sets.values(), global_process_set]):
        raise ArgumentError(
            f"a process set of the ranks {ranks} has been added already; use that one, or remove it first."
        )
    added.group = Group(ranks)
    added.ranks, added.process_set_id = ranks, next(numbers)
    sets[added.process_set_id] = added
    return added


@all_or_none
def remove_process_set(process_set: ProcessSet) -> bool:
    """End the use of a set; collective among all ranks.

    Returns:
        Whether it had been added. The set of all processes cannot be removed.
    """
    sets, _ = _sets.get(current(), ({}, None))
    number = process_set.process_set_id
    numbers = current().communicator.all_gather_object(number, "hvd.remove_process_set")
    if any(other != number for other in numbers):
        raise MismatchError(f"the ranks remove different process sets: numbers {numbers} in rank order.")
    if not number or sets.pop(number, None) is not process_set:
        return False
    if process_set.group is not None:
        process_set.group.close()
    process_set.process_set_id = process_set.group = None
    return True


def group_of(process_set: Any) -> Group | None:
    """What takes part in an operation with this `process_set`; None for all ranks.

    Raises:
        ArgumentError: it is no set, it has not been added, or it is of a job that is over.
    """
    if process_set is None or process_set is global_process_set:
        return None
    if not isinstance(process_set, ProcessSet):
        raise ArgumentError(
            f"process_set={process_set!r:.60} is not a ProcessSet; pass what hvd.add_process_set(ranks) returns."
        )
    number = process_set.process_set_id
    if number is None or _sets.get(current(), ({}, None))[0].get(number) is not process_set:
        raise ArgumentError(f"process_set={process_set} is not in use: hvd.add_process_set(process_set) on all ranks.")
    return process_set.group


def set_of(process_set_id: int) -> ProcessSet:
    """The set that has this number.

    Raises:
        ArgumentError: none has.
    """
    sets, _ = _sets.get(current(), ({}, None))
    found = {0: global_process_set, **sets}.get(process_set_id)
    if found is None:
        raise ArgumentError(f"process_set_id={process_set_id!r:.60} is the number of no process set that is in use.")
    return found


def ranks_of_comm(comm: Any) -> list[int]:
    """The job's ranks of an mpi4py communicator, in its order.

    Raises:
        ArgumentError: it is none, or the ranks of the job are not those of mpi4py's world.
    """
    for read in group_readers:
        if (ranks := read(comm)) is not None:
            return list(ranks)
    raise ArgumentError(
        f"{comm!r:.60} is neither a list of ranks nor a communicator of mpi4py, in a job started by mpirun. Pass ranks."
    )


def _ranks_of(ranks: Iterable[Any]) -> list[int]:
    given = list(ranks)
    if not given or any(isinstance(rank, bool) or not isinstance(rank, int) for rank in given):
        raise ArgumentError(f"ranks={given!r:.100} is not a list of ranks, such as [0, 1].")
    return sorted(given)
