"""libnccl and libcuda: where they are found, and how ctypes calls their functions.

Two NCCLs in one process work, but each keeps threads and device memory of its own. So the NCCL that is already loaded,
such as the one of torch's CUDA build, comes first, then the one of NVIDIA's wheels, then the system's.
RING_NCCL_LIBRARY overrides that order.

**Calls that keep the interpreter's lock.** ctypes releases the lock around each call (`CDLL`). While another thread of
Python computes, that thread takes the lock then, and gives it back after the switch interval of 5 ms: with 15 calls of
a microsecond each, a bucket took 7 to 15 ms to launch. So short calls keep the lock (`PyDLL`). A call that keeps it and
blocks would stop all of Python, the thread too that ends a wait for a dead rank. So which calls keep it is argued
where they are made: for NCCL in `nccl`, for the driver in `stream`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import DeviceError, MissingDependency
from ring_plugins.core.base.install import pip_command

NCCL_SONAME, CUDA_SONAME = "libnccl.so.2", "libcuda.so.1"
NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


#: Name of a C function that returns a status -> ctypes types of its arguments.
Declarations = Mapping[str, tuple[Any, ...]]


class CLibrary:
    """Calls the declared functions of a loaded library; each is looked up at its first use.

    Args:
        library: a `ctypes.CDLL`, or anything else that has C functions as attributes.
        functions: declares them.
        keeping: whose calls keep the interpreter's lock; all others release it.
    """

    def __init__(self, library: Any, functions: Declarations, keeping: Collection[str] = ()) -> None:
        self._library = library
        self._declared = functions
        self._keeping = keeping
        self._functions: dict[str, Any] = {}

    def all_keeping(self) -> CLibrary:
        """The same library, by calls that all keep the interpreter's lock."""
        return CLibrary(self._library, self._declared, self._declared)

    def has(self, name: str) -> bool:
        """Whether the library has a function, whatever its version should have."""
        return hasattr(self._library, name)

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function and return its status.

        Raises:
            AttributeError: the library lacks the function, although its version should have it.
        """
        status: int = (self._functions.get(name) or self.function(name))(*arguments)
        return status

    def function(self, name: str) -> Any:
        """The function of this name, ready to be called.

        Raises:
            AttributeError: the library lacks it.
        """
        library = self._library
        if name in self._keeping and isinstance(library, ctypes.CDLL):
            library = ctypes.PyDLL(library._name, handle=library._handle)
        function = self._functions[name] = getattr(library, name)
        function.argtypes, function.restype = self._declared[name], ctypes.c_int
        return function

    def text(self, name: str, argument_type: Any, argument: Any) -> str:
        """Call a function of one argument that returns a C string, and return that string."""
        function = getattr(self._library, name)
        function.argtypes, function.restype = (argument_type,), ctypes.c_char_p
        found: bytes | None = function(argument)
        return (found or b"").decode(errors="replace").strip()


def open_cuda() -> ctypes.CDLL:
    """Load the CUDA driver library of this machine.

    Raises:
        DeviceError: there is none.
    """
    try:
        return ctypes.CDLL(CUDA_SONAME)
    except OSError as error:
        raise DeviceError(
            f"the CUDA driver ({CUDA_SONAME}) cannot be loaded: {error}. It comes with NVIDIA's driver for the card, "
            "not with pip; a container sees it with `--gpus all`. Without a GPU, train on the CPU."
        ) from error


def open_nccl() -> tuple[ctypes.CDLL, str]:
    """Load NCCL, and return it with its path.

    Raises:
        MissingDependency: there is none; the text lists the places searched and what to install.
        DeviceError: RING_NCCL_LIBRARY names a file that cannot be loaded.
    """
    chosen = config.NCCL_LIBRARY.get()
    if chosen:
        try:
            return ctypes.CDLL(chosen), chosen
        except OSError as error:
            raise DeviceError(f"RING_NCCL_LIBRARY={chosen!r} cannot be loaded: {error}") from error
    failed = []
    for path in nccl_candidates():
        try:
            return ctypes.CDLL(path), path
        except OSError as error:
            failed.append(f"{path}: {error}")
    raise MissingDependency(
        "NCCL is needed to reduce GPU memory and was not found: "
        + ("; ".join(failed) or "nowhere")
        + f". Add it with: {pip_command('nccl')} (CUDA 12) or {pip_command('nccl-cu13')} (CUDA 13); "
        "RING_NCCL_LIBRARY may name a file."
    )


def nccl_candidates() -> list[str]:
    """Paths to try, best first; the last one is the bare name, which the system's loader resolves."""
    return list(dict.fromkeys([*_mapped(), *_in_wheels(), NCCL_SONAME]))  # two wheels may own one file


def _mapped() -> list[str]:
    """NCCL libraries that this process has mapped already."""
    try:
        with open("/proc/self/maps") as maps:
            paths = [line.split(maxsplit=5)[-1].strip() for line in maps if NCCL_SONAME in line]
    except OSError:  # no /proc
        return []
    return [path for path in dict.fromkeys(paths) if os.path.basename(path).startswith(NCCL_SONAME)]


def _in_wheels() -> Iterator[str]:
    """The library in NVIDIA's wheels, installed anywhere that Python looks."""
    for wheel in NCCL_WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == NCCL_SONAME:
                yield str(file.locate())
