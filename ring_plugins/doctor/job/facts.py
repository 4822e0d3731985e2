"""What every rank says of itself and its host."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

import ring_plugins as ring
from ring_plugins.core.linux.process import boot_id
from ring_plugins.core.world import current
from ring_plugins.doctor.devices import nccl_found
from ring_plugins.doctor.network import Interface, interfaces, resolve
from ring_plugins.doctor.packages import versions
from ring_plugins.doctor.settings import readable


@dataclass(frozen=True)
class Facts:
    """One rank and its host.

    Attributes:
        rank, node: its rank, and the number of its host.
        host: name of the host.
        kernel: equal for ranks that share cores, also from different containers.
        cores: those that the process may run on.
        threads: that it would compute with.
        versions: of packages, and of NCCL where there is one.
        interfaces: of the host.
        resolves: for every host of the job, the addresses that its name leads to from here.
        variables: RING_*, which should agree.
    """

    rank: int
    node: int
    host: str
    kernel: str
    cores: tuple[int, ...]
    threads: int
    versions: dict[str, str | None]
    interfaces: tuple[Interface, ...]
    resolves: dict[str, list[str]]
    variables: dict[str, str]

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def gather() -> list[Facts]:
    """Everyone's facts in rank order; collective."""
    place = current().topology
    found: list[Facts] = ring.all_gather_object(own(place.rank, place.node_rank, place.hosts))
    return found


def own(rank: int, node: int, hosts: tuple[str, ...]) -> Facts:
    """The facts of this process."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    known: dict[str, str | None] = {**versions(), "NCCL": nccl_found()[0]}
    return Facts(
        rank,
        node,
        socket.gethostname(),
        boot_id(),
        cores,
        int(threads) if threads.isdigit() and int(threads) else len(cores),
        known,
        tuple(interfaces()),
        {host: resolve(host) for host in dict.fromkeys(hosts)},
        readable(os.environ),
    )
