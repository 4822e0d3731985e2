"""Memory that the processes of one host share, and that nobody can leak.

A segment is an anonymous file in memory (`memfd_create(2)`). It never has a name: peers open it through
`/proc/<pid>/fd/<fd>` of the process that made it, and it is gone with the last process that maps it,
also after SIGKILL. Unlike files in /dev/shm it is not bounded by the 64 MiB that containers grant there.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import SharedMemoryError
from ring_plugins.core.base.types import Bytes

#: Where another process of this host finds a segment: process id, file descriptor there, bytes.
Address = tuple[int, int, int]


def is_available() -> bool:
    """Whether processes can share memory here: Linux, unless RING_SHARED_MEMORY=0."""
    return hasattr(os, "memfd_create") and config.SHARED_MEMORY.get()


def domain() -> str:
    """A text that is equal for two processes exactly if they may open each other's segments.

    Processes in different containers of one machine differ in their process-id namespace.
    """
    if not is_available():
        return f"{os.uname().nodename}/alone/{os.getpid()}"
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{os.uname().nodename}/{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


class Segment:
    """A mapping of one shared segment.

    Attributes:
        array: the whole segment as a 1-d uint8 numpy array; views of it keep the mapping alive.
        fd: the open file, or -1 after `close_file`.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._mapping = mmap.mmap(fd, max(nbytes, 1))
        self.array: Bytes = np.frombuffer(self._mapping, dtype=np.uint8, count=nbytes)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Make a segment of zeros.

        Raises:
            SharedMemoryError: not Linux, or out of memory or file descriptors.
        """
        if not is_available():
            raise SharedMemoryError("shared memory needs Linux and RING_SHARED_MEMORY not 0.")
        try:
            fd = os.memfd_create("ring_plugins")
            try:
                os.ftruncate(fd, max(nbytes, 1))
                return cls(fd, nbytes)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise SharedMemoryError(f"cannot make a shared segment of {nbytes} bytes: {error}.") from error

    @classmethod
    def open(cls, address: Address, rank: int) -> Segment:
        """Map the segment that world rank `rank` made.

        Raises:
            SharedMemoryError: the other process does not exist any more, or may not be looked into.
        """
        pid, fd, nbytes = address
        try:
            return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), nbytes)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot map the memory of rank {rank} (process {pid}): {error}. If the process lives, the two "
                "may not look into each other (different users or capabilities): set RING_SHARED_MEMORY=0 on all ranks."
            ) from error

    @property
    def address(self) -> Address:
        return os.getpid(), self.fd, self.nbytes

    def close_file(self) -> None:
        """Close the file once everyone has mapped it; the mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close_file()


class SharedBuffer:
    """Memory of the same size on every rank of a host, which all of them map.

    Attributes:
        array: this rank's own part, 1-d uint8.
        parts: every local rank's part in rank order, the own one included.
    """

    def __init__(self, parts: Sequence[Bytes], rank: int) -> None:
        self.parts = list(parts)
        self.array = self.parts[rank]
        self._start = address_of(self.array)

    def offset_of(self, array: np.ndarray[Any, Any]) -> int | None:
        """Bytes from the start of this buffer to `array`, or None if it lies elsewhere."""
        offset = address_of(array) - self._start
        return offset if offset >= 0 and offset + array.nbytes <= self.array.nbytes else None


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Memory address of the first element."""
    address: int = array.__array_interface__["data"][0]
    return address


class _Turnstile(threading.local):
    """A lock of each thread's own: of one for all, two threads at once would release what is released."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()


_turnstile = _Turnstile()


def _publish_weakly_ordered() -> None:
    """Make all stores so far visible before any store that follows, and all loads so far happen before what follows.

    On processors that may reorder memory accesses (Arm, POWER) releasing and acquiring a lock is a full fence;
    x86 keeps both in order by itself, see `publish`.
    """
    lock = _turnstile.lock
    lock.release()
    lock.acquire()


def _publish_ordered() -> None:
    """Nothing to do: x86 makes stores visible in program order."""


publish = _publish_ordered if platform.machine() in ("x86_64", "AMD64", "i686") else _publish_weakly_ordered

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("ring_plugins runs on little-endian machines only.")
