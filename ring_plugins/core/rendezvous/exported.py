"""Tells libraries of a rank's process which rank it is, in torchrun's variables and in TensorFlow's TF_CONFIG.

Many libraries train on several processes if the environment speaks of several, and alone, without a word, if it does
not: it says nothing under mpirun and srun, and in a script that started its own ranks. So `init` sets the variables
that are missing, and `shutdown` removes them.

Processes that a rank starts inherit them, as they do under torchrun. To `init` in such a process they say nothing: they
are not a launcher's as long as those by which ranks meet still have the values whose checksums RING_EXPORTED lists, or
are gone. A launcher sets all of these; scripts that start others remove TF_CONFIG, or change LOCAL_RANK.

Not in a job that goes on after losses: its ranks and size change, and the variables could not.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence

from ring_plugins.core.base import config
from ring_plugins.core.base.member import Members

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG")
#: Those that say which rank of how many this process is. Left by something else, they may be wrong.
_PLACE = NAMES[:2]
#: Those by which ranks meet.
_MEETING = (*_PLACE, "MASTER_ADDR", "MASTER_PORT")
#: TF_CONFIG names all ranks, and the kernel starts no program with a variable of more than 128 KiB.
_MOST_IN_TF_CONFIG = 1024


def launchers_value(name: str) -> str:
    """A variable as a launcher, or the user, has set it: "" if it is not set, or was exported by a rank."""
    names, checksums = _exported()
    given = [n for n, checksum in zip(NAMES, checksums, strict=False) if n in _MEETING and _checksum(n) != checksum]
    is_ours = name in names and not any(map(os.environ.get, given))
    return "" if is_ours else os.environ.get(name, "")


def export_members(members: Members, ports: Sequence[int], addresses: Sequence[str]) -> None:
    """As `export`, for the members of a job that has just begun.

    Args:
        members: of the job.
        ports: by rank, one of its host that is free.
        addresses: at which all reach rank 0.
    """
    own, several = members.topology, members.topology.num_nodes > 1
    hosts = [(members.known[rank].addresses if several else ()) or ("127.0.0.1",) for rank in members.ranks]
    hosts[0] = (*(addresses if several else ()), *hosts[0])
    place = own.rank, own.size, own.local_rank, own.local_size
    export(place, [(of[0], port) for of, port in zip(hosts, ports, strict=True)])


def export(place: Sequence[int], ports: Sequence[tuple[str, int]]) -> None:
    """Set those of the variables that are missing or call this process another rank.

    Args:
        place: rank, number of ranks, and the same two on this host.
        ports: by rank, an address of its host and a port there that is free.
    """
    values = dict(zip(NAMES, map(str, (*place, *ports[0])), strict=False))
    if len(ports) <= _MOST_IN_TF_CONFIG:
        workers = [f"{address}:{port}" for address, port in ports]
        values["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": place[0]}}
        )
    names, checksums = _exported()  # by a rank that has started this one's launcher
    inherited = {n for n, checksum in zip(NAMES, checksums, strict=False) if n in names and _checksum(n) == checksum}
    chosen = {
        name: value
        for name, value in values.items()
        if not os.environ.get(name) or name in inherited or (name in _PLACE and os.environ[name] != value)
    }
    os.environ.update(chosen)
    if chosen:
        os.environ[config.EXPORTED.name] = " ".join([",".join(chosen), *map(_checksum, NAMES)])


def withdraw() -> None:
    """Remove what a rank has exported, this process or one from which it has inherited it."""
    names, checksums = _exported()
    for name, checksum in zip(NAMES, checksums, strict=False):
        if name in names and _checksum(name) == checksum:
            os.environ.pop(name, None)
    os.environ.pop(config.EXPORTED.name, None)


def _exported() -> tuple[list[str], list[str]]:
    """The variables that a rank has exported, and the checksums that all of `NAMES` had then."""
    names, *checksums = config.EXPORTED.get().split() or ("",)
    return names.split(","), checksums


def _checksum(name: str) -> str:
    return f"{zlib.crc32(os.environ.get(name, '').encode('utf-8', 'surrogateescape')):x}"
