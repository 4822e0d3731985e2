"""GPUs, and the NCCL that would serve them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from ring_plugins.core.base.errors import RingError
from ring_plugins.core.gpu import load_nccl
from ring_plugins.core.gpu.nccl import version_text
from ring_plugins.doctor.findings import Finding, error, fine, warning
from ring_plugins.doctor.packages import installed

_QUERY = "index,name,memory.total,driver_version"


def gpu_names() -> list[str]:
    """What nvidia-smi says of each GPU: "0, NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15"."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    done = subprocess.run(
        [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def gpus() -> Iterator[Finding]:
    """The GPUs, and whether torch was built for them."""
    names = gpu_names()
    yield fine("GPUs", "; ".join(names) or "none: ranks compute on CPUs", gpus=names)
    torch = installed("torch")
    if names and torch is not None and torch.endswith("+cpu"):
        yield warning("GPUs", f"torch {torch} was built without CUDA", "pip install torch, from the index with CUDA.")


def nccl() -> Iterator[Finding]:
    """Where NCCL is, and its version."""
    version, path = nccl_found()
    if version is None:
        missing = error if gpu_names() else fine
        yield missing("NCCL", path, 'pip install "ring_plugins[nccl]" adds it (CUDA 12), nvidia-nccl-cu13 for CUDA 13.')
    else:
        yield fine("NCCL", f"{version} from {path}", version=version, path=path)


def nccl_found() -> tuple[str | None, str]:
    """The version of the NCCL that would be used and where it is, or None and why there is none."""
    try:
        library = load_nccl()
    except RingError as problem:
        return None, str(problem)
    return version_text(library.version), library.path
