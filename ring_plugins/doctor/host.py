"""Examine one host. MPI, network, packages and settings have their own files; everything else is here."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import RingError
from ring_plugins.core.base.install import pip_command
from ring_plugins.core.gpu import load_nccl
from ring_plugins.core.gpu.library import NCCL_WHEELS
from ring_plugins.core.gpu.nccl import version_text
from ring_plugins.core.linux import process
from ring_plugins.core.linux.shared_memory import Segment, is_available
from ring_plugins.doctor.findings import Check, Finding, error, fine, run_check, warning
from ring_plugins.doctor.gpu_paths import gpu_paths
from ring_plugins.doctor.mpi import mpi
from ring_plugins.doctor.network import host_name, networks
from ring_plugins.doctor.packages import installed, packages
from ring_plugins.doctor.settings import settings

_MIB = 1 << 20
_GIB = 1 << 30


def examine_host() -> Iterator[Finding]:
    """Run every check that needs no other ranks. Takes a few seconds and initializes neither MPI nor CUDA."""
    for check in CHECKS:
        yield from run_check(check)


def nccl() -> Iterator[Finding]:
    """Find NCCL and its version, and wheels that overwrite each other's."""
    yield from conflicting_nccl({wheel: found for wheel in NCCL_WHEELS if (found := installed(wheel))})
    version, path = find_nccl()
    if version is not None:
        yield fine("NCCL", f"{version} from {path}", version=version, path=path)
        return
    if not gpu_names() and not config.NCCL_LIBRARY.is_set():
        yield fine("NCCL", "not needed: this host has no GPU")
        return
    yield error("NCCL", path, f"{pip_command('nccl')} adds it for CUDA 12, [nccl-cu13] for CUDA 13.")


def conflicting_nccl(wheels: Mapping[str, str]) -> Iterator[Finding]:
    """Warn if several of NVIDIA's wheels are installed: they own the same file, and the last one has overwritten it.

    Args:
        wheels: those installed, name -> version.
    """
    if len(wheels) > 1:
        names = " and ".join(f"{name} {version}" for name, version in wheels.items())
        yield warning(
            "NCCL",
            f"{names} are both installed and own one file, nvidia/nccl/lib/libnccl.so.2: one overwrote the other's",
            "Uninstall both, then reinstall the one that torch needs (`pip show torch` lists it; cu13 for CUDA 13).",
            wheels=dict(wheels),
        )


def find_nccl() -> tuple[str | None, str]:
    """Return the version and path of the NCCL that would be used, or None and the reason why there is none."""
    try:
        library = load_nccl()
    except RingError as problem:
        return None, str(problem)
    return version_text(library.version), library.path


def gpus() -> Iterator[Finding]:
    """List the GPUs, and check that torch was built for them."""
    names = gpu_names()
    yield fine("GPUs", "; ".join(names) or "none: ranks compute on CPUs", gpus=names)
    torch = installed("torch")
    if names and torch is not None and torch.endswith("+cpu"):
        yield warning("GPUs", f"torch {torch} was built without CUDA", "pip install torch, from the index with CUDA.")


def gpu_names() -> list[str]:
    """One line per GPU, as nvidia-smi prints it: "0, NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15"."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    done = subprocess.run(
        [tool, "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


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


CHECKS: tuple[Check, ...] = (packages, mpi, nccl, gpus, gpu_paths, cores, memory, networks, host_name, limits, settings)
