"""Which hosts, and how many ranks on each: `-H`, hostfiles, and what a scheduler has allocated."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.rendezvous import slurm


@dataclass(frozen=True)
class Host:
    """A host as a user names it.

    Attributes:
        name: what reaches it: a name or an IPv4 address, with `user@` where ssh needs that.
        slots: how many ranks it may take, None where nobody said.
    """

    name: str
    slots: int | None = None


@dataclass(frozen=True)
class Share:
    """A host and the number of ranks it gets."""

    host: str
    ranks: int


def parse_hosts(text: str) -> list[Host]:
    """Read `host1:2,host2:2`, where `:2` may be missing.

    Raises:
        ArgumentError: a part that is no host, or a number that is not positive.
    """
    return _merge([_host(part.strip(), f"-H {text!r}") for part in text.split(",")])


def read_hostfile(path: str | Path) -> list[Host]:
    """Read a hostfile as Open MPI writes it (`host slots=4`), as MPICH does (`host:4`), or of plain names.

    A `#` begins a comment. A host that stands on several lines gets their slots together.

    Raises:
        ArgumentError: no such file, no host in it, or a line that cannot be read.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ArgumentError(f"hostfile={str(path)!r} cannot be read: {error.strerror}.") from error
    hosts = []
    for number, line in enumerate(lines, start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        host = _host(words[0], where)
        for word in words[1:]:
            name, _, value = word.partition("=")
            if name == "slots":
                host = Host(host.name, _positive(value, where))
            elif name not in ("max_slots", "max-slots", "binding"):
                raise ArgumentError(f"{where}: {word!r} is not known; write `host slots=4`, `host:4` or `host`.")
        hosts.append(host)
    if not hosts:
        raise ArgumentError(f"hostfile={str(path)!r} names no host.")
    return _merge(hosts)


def allocated_hosts(environment: Mapping[str, str] = os.environ) -> list[Host]:
    """The hosts that SLURM or PBS has given to this job, none outside of one."""
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if nodes:
        names = slurm.expand(nodes)
        tasks = slurm.expand_counts(environment.get("SLURM_TASKS_PER_NODE", ""))
        counts: list[int | None] = [*tasks, *[None] * len(names)]
        return [Host(name, count) for name, count in zip(names, counts, strict=False)]
    if nodefile := environment.get("PBS_NODEFILE"):
        return read_hostfile(nodefile)
    return []


def slots(hosts: Sequence[Host]) -> int:
    """How many ranks the hosts take together; one each where no number is said."""
    return sum(host.slots or 1 for host in hosts)


def share(ranks: int, hosts: Sequence[Host]) -> list[Share]:
    """How many ranks each host gets: the hosts are filled in order, and what is over goes round one by one.

    Hosts that get none are left out.
    """
    counts = []
    left = ranks
    for host in hosts:
        counts.append(min(left, host.slots or 1))
        left -= counts[-1]
    for number in range(left):
        counts[number % len(hosts)] += 1
    return [Share(host.name, count) for host, count in zip(hosts, counts, strict=True) if count]


def _host(text: str, where: str) -> Host:
    name, colon, number = text.partition(":")
    if not re.fullmatch(r"(?:[\w.-]+@)?[A-Za-z0-9](?:[\w.-]*\w)?", name):
        raise ArgumentError(f"{where}: {text!r} is not a host; write `host1:2,host2:2`.")
    return Host(name, _positive(number, where) if colon else None)


def _positive(text: str, where: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"{where}: {text!r} is not a positive number of slots.")
    return int(text)


def _merge(hosts: Sequence[Host]) -> list[Host]:
    merged: dict[str, Host] = {}
    for host in hosts:
        before = merged.get(host.name)
        merged[host.name] = host if before is None else Host(host.name, (before.slots or 1) + (host.slots or 1))
    return list(merged.values())
