"""Memory, cores and limits of this host."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from ring_plugins.core.base.errors import RingError
from ring_plugins.core.linux.process import cpu_quota
from ring_plugins.core.linux.shared_memory import Segment, is_available
from ring_plugins.doctor.findings import Finding, error, fine, warning

_MIB = 1 << 20
_GIB = 1 << 30


def memory() -> Iterator[Finding]:
    """Main memory, and the ways in which ranks of a host share it."""
    import psutil

    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    yield fine("memory", f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB are free", free_bytes=free, total_bytes=total)
    if not is_available():
        yield warning(
            "shared memory",
            "switched off by RING_SHARED_MEMORY=0, or not Linux: ranks of one host talk through the network",
            "unset RING_SHARED_MEMORY",
        )
        return
    try:
        segment = Segment.create(_MIB)
        Segment.open(segment.address, 0)
    except (OSError, RingError) as problem:
        yield error(
            "shared memory",
            f"an anonymous file in memory (memfd) cannot be made and mapped: {problem}",
            "Allow memfd_create and /proc/PID/fd in the container, or set RING_SHARED_MEMORY=0 on all ranks.",
        )
        return
    yield fine("shared memory", "works (memfd); ring_plugins does not use /dev/shm")
    shm = Path("/dev/shm")
    size = shutil.disk_usage(shm).total if shm.is_dir() else 0
    if size < 256 * _MIB:
        yield fine(
            "shared memory",
            f"/dev/shm has {size / _MIB:.0f} MiB: nothing to ring_plugins, but little for Open MPI, NCCL and data "
            "loaders' workers",
            "docker run --shm-size 1g, or --ipc host",
            dev_shm_bytes=size,
        )


def cores() -> Iterator[Finding]:
    """How many cores this process may use, and how many threads it would start on them."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = cpu_quota()
    evidence = {"cores_usable": usable, "cores_present": present, "quota_cores": quota}
    yield fine("cores", f"{usable} of {present} may be used: up to {usable} ranks of one thread each", "", **evidence)
    if quota is not None and quota < usable:
        yield warning(
            "cores",
            f"the container's quota is {quota:g} cores, less than the {usable} that programs see",
            f"Start at most {max(1, int(quota))} threads in all, or raise the quota (docker run --cpus).",
            **evidence,
        )
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads:
        yield fine(
            "cores",
            f"OMP_NUM_THREADS is not set: every rank would start {usable} threads",
            "export OMP_NUM_THREADS=1 with one rank a core; in general cores divided by ranks.",
        )


def limits() -> Iterator[Finding]:
    """Limits of the shell that large jobs meet."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    evidence = {"open_files": files, "locked_bytes": locked}
    if files != resource.RLIM_INFINITY and files < 1024:
        yield warning("limits", f"only {files} files may be open; each peer takes a few", "ulimit -n 4096", **evidence)
        return
    text = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / _MIB:.0f} MiB"
    advice = "" if locked == resource.RLIM_INFINITY else "InfiniBand and RoCE want `ulimit -l unlimited`."
    yield fine("limits", f"{files} open files, {text} of locked memory", advice, **evidence)
