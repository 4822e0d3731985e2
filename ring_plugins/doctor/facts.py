"""Facts about every rank and its host, gathered on all ranks."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

import ring_plugins as ring
from ring_plugins.core.linux import thread_count
from ring_plugins.core.linux.process import boot_id
from ring_plugins.core.world import current
from ring_plugins.doctor.gpu_paths import DRIVER, driver_version
from ring_plugins.doctor.host import find_nccl
from ring_plugins.doctor.network import NetworkInterface, network_interfaces, resolve
from ring_plugins.doctor.packages import versions
from ring_plugins.doctor.settings import shown


@dataclass(frozen=True)
class Facts:
    """One rank and its host.

    Attributes:
        rank: rank of the process.
        node: node rank of its host.
        host: name of that host.
        kernel: boot id, equal for ranks that share cores, even in different containers.
        cores: numbers of the cores that the process may run on.
        threads: number of threads that the process computes with.
        versions: package -> version, also of NCCL and of NVIDIA's driver; None if not installed.
        interfaces: network interfaces of the host.
        resolved: each host of the job -> the addresses that its name resolves to here.
        variables: the RING_* variables, which should agree on all ranks.
    """

    rank: int
    node: int
    host: str
    kernel: str
    cores: tuple[int, ...]
    threads: int
    versions: dict[str, str | None]
    interfaces: tuple[NetworkInterface, ...]
    resolved: dict[str, list[str]]
    variables: dict[str, str]

    def record(self) -> dict[str, Any]:
        """The facts as JSON values."""
        return asdict(self)

    @property
    def external_addresses(self) -> list[str]:
        """Addresses at which other hosts may reach this host."""
        return [address for one in self.interfaces if one.external for address in one.addresses]


def gather_facts() -> list[Facts]:
    """Gather the facts of all ranks, in rank order. Collective."""
    topology = current().topology
    found: list[Facts] = ring.all_gather_object(own_facts(topology.rank, topology.node_rank, topology.hosts))
    return found


def own_facts(rank: int, node: int, hosts: tuple[str, ...]) -> Facts:
    """The facts of this process."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return Facts(
        rank,
        node,
        socket.gethostname(),
        boot_id(),
        cores,
        thread_count.threads_in_use(),
        {**versions(), "NCCL": find_nccl()[0], DRIVER: driver_version()},
        tuple(network_interfaces()),
        {host: resolve(host) for host in dict.fromkeys(hosts)},
        shown(os.environ),
    )
