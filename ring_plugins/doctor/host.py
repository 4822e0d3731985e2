"""One host: facts about it and its ranks, and checks of its cores, memory, network and limits.

GPUs have a file of their own; packages, MPI and settings share `installation.py`.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError, RingError
from ring_plugins.core.linux import interfaces as linux
from ring_plugins.core.linux import process, thread_count
from ring_plugins.core.linux.shared_memory import Segment, is_available
from ring_plugins.core.net.network_choice import own_interfaces
from ring_plugins.doctor.findings import Check, Finding, error, fine, run_check, warning
from ring_plugins.doctor.gpus import DRIVER, driver_version, find_nccl, gpu_paths, gpus, nccl
from ring_plugins.doctor.installation import mpi, packages, settings, shown, versions

_MIB = 1 << 20
_GIB = 1 << 30
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


def own_facts(rank: int, node: int, hosts: tuple[str, ...]) -> Facts:
    """The facts of this process."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return Facts(
        rank,
        node,
        socket.gethostname(),
        process.boot_id(),
        cores,
        thread_count.threads_in_use(),
        {**versions(), "NCCL": find_nccl()[0], DRIVER: driver_version()},
        tuple(network_interfaces()),
        {host: resolve(host) for host in dict.fromkeys(hosts)},
        shown(os.environ),
    )


# Checks -------------------------------------------------------------------------------------------


def examine_host() -> Iterator[Finding]:
    """Run every check that needs no other ranks. Takes a few seconds and initializes neither MPI nor CUDA."""
    for check in CHECKS:
        yield from run_check(check)


def cores() -> Iterator[Finding]:
    """Count the cores that this process may use, and the threads it would start on them."""
    visible, present, allowed = len(os.sched_getaffinity(0)), os.cpu_count() or 1, process.cores()
    quota = process.cpu_quota()
    evidence = {"cores_usable": allowed, "cores_present": present, "quota_cores": quota}
    ranks = f"{allowed} rank{'s' if allowed > 1 else ''}"
    yield fine("cores", f"{allowed} of {present} may be used: enough for {ranks} of one thread each", "", **evidence)
    if quota is not None and quota < visible:
        yield warning(
            "cores",
            f"the container's quota is {quota:g} of the {visible} cores that programs see",
            f"Start at most {allowed} threads in all, or raise the quota (docker run --cpus).",
            **evidence,
        )
    if not os.environ.get("OMP_NUM_THREADS"):
        yield fine(
            "cores",
            "OMP_NUM_THREADS is not set: ring_plugins.init() gives each rank its share of the cores",
        )


def memory() -> Iterator[Finding]:
    """Check main memory, and whether ranks of this host can share it."""
    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    yield fine("memory", f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB are free", free_bytes=free, total_bytes=total)
    if not is_available():
        yield warning(
            "shared memory",
            "off because of RING_SHARED_MEMORY=0 or a system other than Linux: ranks of one host use the network",
            "unset RING_SHARED_MEMORY",
        )
        return
    try:
        segment = Segment.create(_MIB)
        Segment.open(segment.address, 0)
    except (OSError, RingError) as problem:
        yield error(
            "shared memory",
            f"an anonymous file in memory (memfd) cannot be created and mapped: {problem}",
            "Allow memfd_create and /proc/PID/fd in the container, or set RING_SHARED_MEMORY=0 on all ranks.",
        )
        return
    yield fine("shared memory", "works (memfd); ring_plugins does not use /dev/shm")
    shm = Path("/dev/shm")
    size = shutil.disk_usage(shm).total if shm.is_dir() else 0
    if size < 256 * _MIB:
        yield fine(
            "shared memory",
            f"/dev/shm has {size / _MIB:.0f} MiB: enough for ring_plugins, which does not use it, but little for "
            "Open MPI, NCCL and the workers of data loaders",
            "docker run --shm-size 1g, or --ipc host",
            dev_shm_bytes=size,
        )


def limits() -> Iterator[Finding]:
    """Check the resource limits (ulimit) that large jobs run into."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    evidence = {"open_files": files, "locked_bytes": locked}
    if files != resource.RLIM_INFINITY and files < 1024:
        yield warning("limits", f"only {files} files may be open; each peer needs a few", "ulimit -n 4096", **evidence)
        return
    text = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / _MIB:.0f} MiB"
    advice = "" if locked == resource.RLIM_INFINITY else "InfiniBand and RoCE need `ulimit -l unlimited`."
    yield fine("limits", f"{files} open files, {text} of locked memory", advice, **evidence)


def networks() -> Iterator[Finding]:
    """List the interfaces, and those that data between hosts may take."""
    found = network_interfaces()
    external = [one for one in found if one.external]
    evidence: dict[str, Any] = {"interfaces": [asdict(one) for one in found]}
    listed = ", ".join(map(str, found))
    wanted = config.INTERFACE.get()
    try:
        own_interfaces(0)
    except LaunchError as problem:
        choices = ", ".join(one.name for one in external) or "none"
        yield error("network", str(problem), f"Choose among {choices}, or unset RING_INTERFACE.", **evidence)
        return
    if not external:
        yield warning("network", f"only {listed}: no other host can be reached", "ip link; ip address", **evidence)
    elif wanted:
        yield fine("network", f"{listed}; RING_INTERFACE={wanted} decides which is used between hosts", **evidence)
    else:
        choices = " or ".join(one.name for one in external)
        which = choices if len(external) == 1 else f"{choices}, the fastest that all hosts are on,"
        yield fine("network", f"{listed}; between hosts {which} would be used", **evidence)


def host_name() -> Iterator[Finding]:
    """Check that this host's own name resolves to an address that others can use."""
    name = socket.gethostname()
    found = resolve(name)
    if not found:
        yield warning(
            "host name",
            f"{name} does not resolve, not even on this host",
            f"Add a line to /etc/hosts on every host: ADDRESS {name}",
        )
    elif all(address.startswith("127.") for address in found):
        yield fine(
            "host name",
            f"{name} resolves to {', '.join(found)} here, a loopback address; a job on several hosts that uses this "
            "name for its rendezvous will not find this host",
            f"For several hosts, put the address that others can reach into /etc/hosts instead: ADDRESS {name}",
            addresses=found,
        )
    else:
        yield fine("host name", f"{name} resolves to {', '.join(found)}", addresses=found)


CHECKS: tuple[Check, ...] = (packages, mpi, nccl, gpus, gpu_paths, cores, memory, networks, host_name, limits, settings)
