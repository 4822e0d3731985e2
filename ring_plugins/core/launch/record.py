"""What the environment says about how this process was started."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ring_plugins.core.errors import LaunchError
from ring_plugins.core.plane import Plane


@dataclass(frozen=True)
class LaunchRecord:
    """Read from the environment, without side effects.

    Attributes:
        kind: "mpi", "rendezvous" (torchrun's variables), "grown" (child of a script that grew) or "alone".
        by: the launcher in a user's words.
        rank, size: as the launcher says, None where only connecting tells.
        local_rank, local_size: on this host, None where the launcher does not say.
        variables: environment variables to set before connecting.
    """

    kind: str
    by: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Connection:
    """The ranks have found each other.

    Attributes:
        rank, size: of this process and of the job.
        gather: everyone's payload in rank order; for starting up.
        plane: carries data between hosts; None where all ranks are on this one.
        close: called at shutdown.
        addresses: of rank 0's host, under which all reach it, the likeliest first; as far as this rank knows.
        abort: ends every process of the job with a status, as far as the launcher offers that.
    """

    rank: int
    size: int
    gather: Callable[[Any], list[Any]]
    plane: Plane | None
    close: Callable[[], None] = lambda: None
    addresses: tuple[str, ...] = ()
    abort: Callable[[int], None] = lambda code: None


def integer(name: str) -> int | None:
    """An integer environment variable, None where it is not set.

    Raises:
        LaunchError: set to something else.
    """
    text = os.environ.get(name)
    if text is None or text == "":
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"environment variable {name}={text!r} is not an integer.") from None
