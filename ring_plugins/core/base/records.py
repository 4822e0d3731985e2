"""Records that the ranks of a starting job send each other, read so that whoever sends something else is named.

A rank may do so that runs another program, or whoever poses as a rank of a job without RING_SECRET.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, get_type_hints

from ring_plugins.core.base.arguments import fits
from ring_plugins.core.base.errors import LaunchError

Record = TypeVar("Record", bound=NamedTuple)
Read = TypeVar("Read")
_hints = functools.cache(get_type_hints)


def read_each(items: Iterable[Any], read: Callable[[Any], Read]) -> list[Read]:
    """What all ranks have sent, in rank order.

    Args:
        items: by rank.
        read: makes a record of an item, or raises an error of Python's.

    Raises:
        LaunchError: a rank has sent something else.
    """
    found = []
    for rank, item in enumerate(items):
        try:
            found.append(read(item))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise LaunchError(
                f"rank {rank} sent what no rank sends while the job starts ({type(error).__name__}): something other "
                "than this release of ring_plugins runs there. Start all ranks alike; with RING_SECRET set alike on "
                "all of them, nothing else can pose as one (docs/security.md)."
            ) from error
    return found


def read_as(hint: type[Read], value: Any) -> Read:
    """A value that is what a type hint says.

    Raises:
        TypeError: it is not.
    """
    if type(value) is not hint and not fits(value, hint):  # the first is quick: a job may have thousands of ranks
        raise TypeError(f"{type(value).__name__} instead of {hint}")
    return value  # type: ignore[no-any-return]


def read_record(kind: type[Record], item: Any) -> Record:
    """A named tuple of this kind from its fields, whose types are checked.

    Raises:
        TypeError: they are others.
    """
    record = kind(*item)
    for name, value in record._asdict().items():
        read_as(_hints(kind)[name], value)
    return record


def read_address(value: Any) -> tuple[int, int, int]:
    """The address of a segment of shared memory, which JSON makes a list.

    Raises:
        TypeError, ValueError: it is none.
    """
    pid, descriptor, nbytes = value
    return read_as(int, pid), read_as(int, descriptor), read_as(int, nbytes)


def read_port(value: Any) -> int:
    """A port that can be connected to.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not 0 < read_as(int, value) < 1 << 16:
        raise ValueError(f"{value} is no port")
    return int(value)
