"""What the environment says about how this process was started.

What must be the same in every rank's installation, or ranks would misunderstand each other later.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.net.transport import Transport


def own_versions() -> dict[str, str]:
    """Of this process: ring_plugins exactly, Python and numpy as far as their pickles go."""
    try:
        package = metadata.version("ring_plugins")
    except metadata.PackageNotFoundError:  # run from a checkout
        package = "unknown"
    python = ".".join(platform.python_version_tuple()[:2])
    return {"ring_plugins": package, "Python": python, "numpy": np.__version__.partition(".")[0]}


def differences(ranks: Mapping[int, tuple[str, Mapping[str, str]]]) -> str:
    """A sentence about ranks whose versions differ from the first's, "" if none does.

    Args:
        ranks: rank -> (host, versions).
    """
    first, (first_host, expected) = next(iter(ranks.items()))
    said = []
    for name in expected:
        others: dict[str, list[str]] = {}
        for rank, (host, versions) in ranks.items():
            if versions.get(name) != expected[name]:
                others.setdefault(str(versions.get(name)), []).append(f"rank {rank} on {host}")
        for version, who in others.items():
            listed = ", ".join(who[:8]) + (f" and {len(who) - 8} more" if len(who) > 8 else "")
            said.append(f"{name} is {expected[name]} on rank {first} on {first_host}, but {version} on {listed}")
    if not said:
        return ""
    return f"the ranks' installations differ: {'; '.join(said)}. Install the same environment on every host."


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
    transport: Transport | None
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
