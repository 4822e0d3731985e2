"""Facts about every rank and its host, gathered on all ranks."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

import psutil

import ring_plugins as ring
from ring_plugins.core.linux import interfaces as linux
from ring_plugins.core.linux import thread_count
from ring_plugins.core.linux.process import boot_id
from ring_plugins.core.world import current
from ring_plugins.doctor.gpus import DRIVER, driver_version, find_nccl
from ring_plugins.doctor.installation import shown, versions

#: Some drivers report an unknown speed as -1, which psutil may return as an unsigned number of this size.
_UNKNOWN_SPEED = 1 << 31


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface that is up, with all its addresses.

    Attributes:
        name: name, as in `ip link`.
        addresses: IPv4 addresses.
        networks: the networks of those addresses ("10.0.0.0/16").
        megabits: stated speed in Mbit/s, 0 if the driver states none. The speed of a virtual card is fictitious.
        external: whether other hosts may be on its network: not loopback or a bridge of containers or virtual machines.
    """

    name: str
    addresses: tuple[str, ...]
    networks: tuple[str, ...]
    megabits: int
    external: bool

    def __str__(self) -> str:
        speed = f"{self.megabits / 1000:g} Gbit/s" if self.megabits else "speed not stated"
        return f"{self.name} ({', '.join(self.addresses)}; {speed})"


def network_interfaces() -> list[NetworkInterface]:
    """Interfaces that are up and have an address: external ones first, fast before slow."""
    by_name: dict[str, list[linux.Interface]] = {}
    for one in linux.interfaces():
        by_name.setdefault(one.name, []).append(one)
    states = psutil.net_if_stats()
    found = [
        NetworkInterface(
            name,
            tuple(one.address for one in same_name),
            tuple(one.network for one in same_name),
            states[name].speed if name in states and states[name].speed < _UNKNOWN_SPEED else 0,
            not same_name[0].internal,
        )
        for name, same_name in by_name.items()
    ]
    return sorted(found, key=lambda one: (not one.external, -one.megabits, one.name))


def resolve(name: str) -> list[str]:
    """The IPv4 addresses of a host name, [] if it does not resolve."""
    try:
        return sorted({str(item[4][0]) for item in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        return []


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
