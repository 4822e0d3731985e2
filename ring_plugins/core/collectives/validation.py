"""Checks of the arguments of collectives, shared by all frameworks and communicators, host memory and GPUs alike.

`ArgumentError` means that an argument is invalid on this rank alone; it is raised before anything is sent.
`MismatchError` means that the ranks' arguments do not fit together; every rank raises it.
`core.arrays.dtypes.check_reducible` checks that an operation is defined for an element type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import index
from typing import Any

from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError, is_rejection
from ring_plugins.core.collectives.api import Communicator


@contextlib.contextmanager
def rejections_told(communicator: Communicator[Any], operation: str) -> Iterator[None]:
    """Tell the other members if this one takes no part in an operation; see `Communicator.reject`."""
    try:
        yield
    except Exception as error:
        communicator.reject(operation, error)
        raise


@contextlib.contextmanager
def on_all_or_none(communicator: Communicator[Any], what: str, is_alone: bool = False) -> Iterator[None]:
    """Let the other members know if an exception, of whatever kind, ends a construction that all take part in.

    Other members raise errors of ours too, unless this one `is_alone`: at what it does without them.
    """
    try:
        yield
    except BaseException as error:
        if is_rejection(error):
            communicator.reject(what, error)
        elif is_alone or not isinstance(error, RingError):
            communicator.interrupt(what, error)
        raise


def check_rank(rank: int, communicator: Communicator[Any], name: str = "root") -> int:
    """Return `rank` as an int if it is one of the communicator.

    Raises:
        ArgumentError: it is not an integer, of Python or numpy, or out of range.
    """
    try:
        found = -1 if isinstance(rank, bool) else index(rank)
    except TypeError:
        found = -1
    if not 0 <= found < communicator.size:
        raise ArgumentError(f"{name}={rank!r} is not a rank of {communicator.name}, which has {communicator.size}.")
    return found


def check_counts(counts: Sequence[int], elements: int, name: str = "counts") -> None:
    """Check that consecutive parts cover all elements.

    Raises:
        ArgumentError: a count is negative, or they do not add up to `elements`.
    """
    if sum(counts) != elements or any(count < 0 for count in counts):
        raise ArgumentError(f"{name}={list(counts)} do not add up to the {elements} elements given.")


def check_own_count(counts: Sequence[int], elements: int, communicator: Communicator[Any], name: str) -> None:
    """Check that there is a count for every rank, and that this rank's fits its memory.

    Args:
        counts: elements of each rank.
        elements: how many this rank's memory has.
        communicator: of the ranks.
        name: what to call the memory in an error.

    Raises:
        ArgumentError: it does not.
    """
    rank, size = communicator.rank, communicator.size
    if len(counts) != size or elements != counts[rank]:
        raise ArgumentError(
            f"counts={list(counts)} on rank {communicator.ranks[rank]}: there must be one for each of {size} ranks, "
            f"and this rank's {name} has {elements} elements."
        )


def rows_of(shape: Sequence[int], collective: str) -> int:
    """Return the first dimension of `x`.

    Raises:
        ArgumentError: `x` has none.
    """
    if not shape:
        raise ArgumentError(f"x is 0-d; {collective} needs at least one dimension.")
    return shape[0]


def scatter_rows(rows: int, size: int) -> list[int]:
    """The number of rows of a reduce-scatter for each rank: equal parts, the first ones longer by one if needed."""
    quotient, rest = divmod(rows, size)
    return [quotient + (i < rest) for i in range(size)]


def check_splits(splits: Sequence[int] | None, rows: int, size: int) -> list[int]:
    """The number of rows of an all-to-all for each rank.

    Args:
        splits: as the caller gave them, None for equal parts.
        rows: first dimension of `x`.
        size: number of ranks.

    Raises:
        ArgumentError: there are no equal parts, or the splits are not `size` counts that add up to `rows`.
    """
    if splits is None:
        if rows % size:
            raise ArgumentError(f"x has {rows} rows, which {size} ranks cannot share equally; pass splits.")
        return [rows // size] * size
    try:
        counts = [int(index(split)) for split in splits]
    except TypeError as error:
        raise ArgumentError(
            f"splits={splits!r:.60} must be {size} whole numbers of rows, one for each rank."
        ) from error
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise ArgumentError(f"splits={counts} must be {size} numbers that add up to the {rows} rows of x.")
    return counts


def exchange_rows(
    communicator: Communicator[Any], rows: Sequence[int], trailing: Sequence[int], dtype: str, collective: str
) -> list[tuple[int, ...]]:
    """Exchange the ranks' numbers of rows, and check that everything else is equal; collective.

    Args:
        communicator: all its ranks call.
        rows: this rank's numbers of rows, which may differ from other ranks'.
        trailing: dimensions of `x` after the first.
        dtype: its element type.
        collective: name of the operation, for the error.

    Returns:
        The `rows` of all ranks in rank order.

    Raises:
        MismatchError: trailing dimensions or dtypes differ; all ranks raise it, and may continue.
    """
    gathered = communicator.all_gather_object((tuple(rows), tuple(trailing), dtype), collective)
    if len({item[1:] for item in gathered}) > 1:
        shapes = ", ".join(
            f"rank {rank}: ({', '.join(map(str, ('*', *item[1])))}) {item[2]}"
            for rank, item in zip(communicator.ranks, gathered, strict=True)
        )
        error = MismatchError(
            f"x of {collective} must have equal trailing dimensions and dtype on all ranks, but {shapes}."
        )
        error.is_known = True
        raise error
    return [item[0] for item in gathered]
