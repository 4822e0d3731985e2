"""What a launcher is, what its variables say of a process, and what a rendezvous yields.

Also the versions that must agree on all ranks: ranks with different releases would misunderstand each other later.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata
from typing import Any

import numpy as np

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.net.transport import Transport
from ring_plugins.core.rendezvous.slots import OwnSlot

#: What has made this process a rank, if no launcher has: "ring_plugins.run", or a plugin. For messages.
caller = ""


class Loss(Enum):
    """What a launcher does to the other ranks when one is lost, and so how a job can continue under it."""

    ENDS_ALL = "It ends them, and nothing can be done about that."
    STARTS_ANEW = "It ends them. Its processes can become supervisors of ranks that start anew (launcher_shim.py)."
    AS_TOLD = "It is ours: it lets them continue if it was told to, by RING_LOSSES_TOLERATED."
    NOTHING = "Each process was started by itself, and nobody ends or replaces another."
    ALONE = "There are no others: the script can start again under `ring run`."


@dataclass(frozen=True)
class Launcher:
    """All in which a launcher differs from others; launchers.py has one object for each.

    Attributes:
        kind: how its ranks meet, as RING_LAUNCHER names that: "mpi", "rendezvous", "slurm", "spawned" or "single".
        name: in a user's words.
        find: reads its variables; returns None if it has not started this process, or not as the innermost launcher.
        connect: meets the other ranks, given the record, the number of ranks that `init` is asked for or None, and how
            often this process has connected before.
        identity: variables that tell a process from all others of all its jobs on a host.
        variables: all that it sets for one process, which ranks that start anew do not get. Names that end in "_" are
            beginnings of names.
        kept: beginnings of the names of those that ranks get nevertheless: they tell of the whole job.
        at_loss: what it does when a rank is lost.
        exchange: meets the other processes once, to exchange a payload; where `at_loss` is STARTS_ANEW.
        uses_mpi: whether MPI connects the ranks. A process can join MPI once only, and none can in its place.
        uses_master: whether rank 0 listens at MASTER_ADDR and MASTER_PORT.
        counts_ranks_of_host: whether its number of ranks on this host can be trusted.
        is_parent: whether the parent of a rank lives as long as the job.
        half_started: says why a process that no launcher has started is nevertheless one of several of this one, and
            what to do; "" if it is not. Gets the number of ranks that `init` is asked for, or None.
    """

    kind: str
    name: str
    find: Callable[[Launcher], LaunchRecord | None]
    connect: Callable[[LaunchRecord, int | None, int], Rendezvous]
    identity: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    at_loss: Loss = Loss.ENDS_ALL
    exchange: Callable[[LaunchRecord, Any], list[Any]] | None = None
    uses_mpi: bool = False
    uses_master: bool = False
    counts_ranks_of_host: bool = False
    is_parent: bool = False
    half_started: Callable[[int | None], str] = lambda ranks: ""

    @property
    def is_none(self) -> bool:
        """Whether no launcher has started this process together with others."""
        return self.at_loss is Loss.ALONE

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class LaunchRecord:
    """What the environment says, read without side effects.

    Attributes:
        launcher: that has started this process.
        rank, size: as the launcher says, None if known only after connecting.
        local_rank, local_size: on this host, None where the launcher does not say.
        variables: environment variables to set before connecting.
    """

    launcher: Launcher
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def by(self) -> str:
        """The launcher in a user's words."""
        return self.launcher.name


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


def read(launcher: Launcher, rank: str, size: str, local_rank: str, local_size: str) -> LaunchRecord:
    """The record that four integer variables give."""
    return LaunchRecord(launcher, integer(rank), integer(size), integer(local_rank), integer(local_size))


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
