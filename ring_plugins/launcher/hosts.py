"""Which hosts a job uses and how many ranks each gets, from `-H`, a hostfile, or a scheduler's allocation."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.rendezvous import slurm


@dataclass(frozen=True)
class Host:
    """A host as the user names it.

    Attributes:
        name: name or IPv4 address, with `user@` where ssh needs that.
        slots: number of ranks it may take, None if not given.
    """

    name: str
    slots: int | None = None


@dataclass(frozen=True)
class Share:
    """A host and the number of ranks placed on it."""

    host: str
    ranks: int


def parse_hosts(text: str) -> list[Host]:
    """Parse `host1:2,host2:2`; the `:2` is optional.

    Raises:
        ArgumentError: a part is not a host, or its number is not positive.
    """
    return _merge([_host(part.strip(), f"-H {text!r}") for part in text.split(",")])


def read_hostfile(path: str | Path) -> list[Host]:
    """Read a hostfile in Open MPI's form (`host slots=4`), in MPICH's (`host:4`), or of plain names.

    A `#` starts a comment. A host that is listed several times gets the sum of its slots.

    Raises:
        ArgumentError: the file cannot be read, names no host, or has a line of another form.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ArgumentError(f"hostfile={str(path)!r} cannot be read: {error.strerror}.") from error
    return parse_hostfile(text, str(path), f"hostfile={str(path)!r}")


def parse_hostfile(text: str, lines_of: str, origin: str) -> list[Host]:
    """The hosts of a text as `read_hostfile` reads it.

    Args:
        text: the lines.
        lines_of, origin: what errors call the text, before the number of a line and otherwise.

    Raises:
        ArgumentError: it names no host, or has a line of another form.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        where = f"{lines_of}, line {number}"
        host = _host(words[0], where)
        for word in words[1:]:
            name, _, value = word.partition("=")
            if name == "slots":
                host = Host(host.name, _positive(value, where))
            elif name not in ("max_slots", "max-slots", "binding"):
                raise ArgumentError(f"{where}: {word!r} is not known; write `host slots=4`, `host:4` or `host`.")
        hosts.append(host)
    if not hosts:
        raise ArgumentError(f"{origin} names no host.")
    return _merge(hosts)


def allocated_hosts(environment: Mapping[str, str] = os.environ) -> list[Host]:
    """The hosts that SLURM or PBS has allocated to this job; empty outside of such a job."""
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
    """Number of ranks that the hosts take together; a host without a number takes one."""
    return sum(host.slots or 1 for host in hosts)


def share(ranks: int, hosts: Sequence[Host]) -> list[Share]:
    """Place ranks on hosts: fill the hosts in order, then distribute the remaining ranks round-robin.

    Hosts that get no rank are left out.
    """
    counts = []
    left = ranks
    for host in hosts:
        counts.append(min(left, host.slots or 1))
        left -= counts[-1]
    for number in range(left):
        counts[number % len(hosts)] += 1
    return [Share(host.name, count) for host, count in zip(hosts, counts, strict=True) if count]


def is_this_host(name: str) -> bool:
    """Whether a name or address, with or without `user@`, is that of the host this process runs on."""
    name = name.rpartition("@")[2]
    own = socket.gethostname()
    if name in (own, own.split(".")[0], "localhost") or name.startswith("127."):
        return True
    try:
        address = socket.gethostbyname(name)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))  # only this host's own addresses can be bound
    except OSError:
        return False
    return True


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
