"""Finding libnccl: the one this process already uses, else the wheel's, else the system's."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from collections.abc import Iterator

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import DeviceError, MissingDependency
from ring_plugins.core.gpu.nccl import Nccl

SONAME = "libnccl.so.2"
WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@functools.lru_cache(maxsize=1)
def load_nccl() -> Nccl:
    """NCCL for this process, found once.

    Two NCCLs in one process work, but each keeps threads and device memory of its own, so the one that is already
    there, such as that of torch's CUDA build, comes first. RING_NCCL_LIBRARY overrules everything.

    Raises:
        MissingDependency: there is none; the text says where was looked and what to install.
        DeviceError: RING_NCCL_LIBRARY names something that cannot be loaded, or the library is too old.
    """
    chosen = config.NCCL_LIBRARY.get()
    if chosen:
        try:
            return Nccl(ctypes.CDLL(chosen), chosen)
        except OSError as error:
            raise DeviceError(f"RING_NCCL_LIBRARY={chosen!r} cannot be loaded: {error}") from error
    failed = []
    for path in candidates():
        try:
            return Nccl(ctypes.CDLL(path), path)
        except OSError as error:
            failed.append(f"{path}: {error}")
    raise MissingDependency(
        "NCCL is needed to reduce GPU memory and was not found: "
        + ("; ".join(failed) or "nowhere")
        + '. Add it with: pip install "ring_plugins[nccl]" (CUDA 12) or pip install nvidia-nccl-cu13 (CUDA 13); '
        "RING_NCCL_LIBRARY may name a file."
    )


def candidates() -> Iterator[str]:
    """Where to look, best first: paths, and at last the bare name for the system's loader to find."""
    yield from _mapped()
    yield from _in_wheels()
    yield SONAME


def _mapped() -> list[str]:
    """Files of that name which this process has mapped already."""
    try:
        with open("/proc/self/maps") as maps:
            paths = [line.split(maxsplit=5)[-1].strip() for line in maps if SONAME in line]
    except OSError:  # no /proc
        return []
    return [path for path in dict.fromkeys(paths) if os.path.basename(path).startswith(SONAME)]


def _in_wheels() -> Iterator[str]:
    """The library in NVIDIA's wheels, installed anywhere that Python looks."""
    for wheel in WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == SONAME:
                yield str(file.locate())
