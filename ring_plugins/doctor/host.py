"""Examine one host: cores, memory, network and limits. GPUs, MPI, packages and settings have their own files."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError, RingError
from ring_plugins.core.linux import process
from ring_plugins.core.linux.shared_memory import Segment, is_available
from ring_plugins.core.net.network_choice import own_interfaces
from ring_plugins.doctor.facts import network_interfaces, resolve
from ring_plugins.doctor.findings import Check, Finding, error, fine, run_check, warning
from ring_plugins.doctor.gpus import gpu_paths, gpus, nccl
from ring_plugins.doctor.installation import packages, settings
from ring_plugins.doctor.mpi import mpi

_MIB = 1 << 20
_GIB = 1 << 30


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
