"""What the environment says about how a process was started, and what a rendezvous yields.

Also the versions that must agree on all ranks: ranks with different releases would misunderstand each other later.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.net.transport import Transport
from ring_plugins.core.rendezvous.slots import OwnSlot


@dataclass(frozen=True)
class LaunchRecord:
    """What the environment says, read without side effects.

    Attributes:
        kind: "mpi", "rendezvous" (torchrun's variables), "spawned" (by a script that started itself) or "single".
        by: the launcher in a user's words.
        rank, size: as the launcher says, None if known only after connecting.
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
class Rendezvous:
    """What a rank has once all ranks of the job have found each other.

    Attributes:
        rank, size: of this process and of the job.
        gather: returns every rank's payload in rank order; for starting up.
        transport: moves data between hosts; None if all ranks are on this host.
        close: called at shutdown.
        addresses: of rank 0's host, at which all ranks should reach it, the likeliest first.
        abort: ends every process of the job with a status, if the launcher can.
        slot: where this process tells what has started it how far it is, if that is ours.
    """

    rank: int
    size: int
    gather: Callable[[Any], list[Any]]
    transport: Transport | None
    close: Callable[[], None] = lambda: None
    addresses: tuple[str, ...] = ()
    abort: Callable[[int], None] = lambda code: None
    slot: OwnSlot | None = None


def own_versions() -> dict[str, str]:
    """Versions in this process: of ring_plugins in full, of Python and numpy the part that pickles depend on."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"ring_plugins": _own_version(), "Python": python, "numpy": np.__version__.partition(".")[0]}


@functools.cache  # rank 0 compares it with every rank's, and finding it takes a millisecond
def _own_version() -> str:
    try:
        return metadata.version("ring_plugins")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"


def differences(ranks: Mapping[int, tuple[str, Mapping[str, str]]]) -> str:
    """A sentence about ranks whose versions differ from the first rank's, "" if none does.

    Args:
        ranks: rank -> (host, versions).
    """
    first, (first_host, expected) = next(iter(ranks.items()))
    found = []
    for name in expected:
        others: dict[str, list[str]] = {}
        for rank, (host, versions) in ranks.items():
            if versions.get(name) != expected[name]:
                others.setdefault(str(versions.get(name)), []).append(f"rank {rank} on {host}")
        for version, where in others.items():
            listed = ", ".join(where[:8]) + (f" and {len(where) - 8} more" if len(where) > 8 else "")
            found.append(f"{name} is {expected[name]} on rank {first} on {first_host}, but {version} on {listed}")
    if not found:
        return ""
    return f"the ranks' installations differ: {'; '.join(found)}. Install the same environment on every host."


def integer(name: str) -> int | None:
    """An integer environment variable, None where it is not set.

    Raises:
        LaunchError: it is set to something else.
    """
    text = os.environ.get(name)
    if text is None or text == "":
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"environment variable {name}={text!r} is not an integer.") from None
