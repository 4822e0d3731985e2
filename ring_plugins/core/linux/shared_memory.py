"""Memory that the processes of one host share, and that the kernel always frees.

The usual ways to share memory leave something behind when a process is killed: POSIX segments stay in /dev/shm, System
V segments in the kernel, both until somebody removes them. Containers also limit /dev/shm to 64 MiB by default.

So a segment here is an anonymous file in memory (memfd_create(2)). It has no name: peers open it through
/proc/PID/fd/FD of the process that made it, and the kernel frees it with the last process that maps it, even after
SIGKILL. It counts as memory of the process and not as part of /dev/shm.

Opening /proc/PID/fd/FD needs the permission to trace that process (ptrace(2), "access mode checking"), which processes
of one user in one process-id namespace have. Processes that lack it get a `SharedMemoryError` that says so. Passing
file descriptors over Unix sockets would need no such permission, but a connection for each pair of ranks.

**Forked children.** A forked child would share this memory with its parent: whatever it wrote to its gradients would
reach the parent and the other ranks. So a segment that users get views of is copied before a fork, and the copy
replaces the child's mapping (`own_copy_in_children`): the child sees what it would have seen with ordinary memory. It
loses access to the other ranks' segments (`hide_from_children`). madvise(2) offers neither: MADV_WIPEONFORK is for
private memory, and after MADV_DONTFORK the child's allocator may use the gap.

A process sleeps until another one changes a word of such memory with Linux's futex(2), called through libc's syscall():
Python offers no futex, and its locks live in one process. Where the system call's number is unknown, sleeping is a
short nap and waking does nothing: callers look at the word again in any case.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import SharedMemoryError
from ring_plugins.core.base.types import Bytes
from ring_plugins.core.linux.process import boot_id

#: What the kernel shows as the name of a segment's file.
_NAME = "ring_plugins"
#: Where another process of this host finds a segment: process id, file descriptor there, bytes.
Address = tuple[int, int, int]


def is_available() -> bool:
    """Whether processes can share memory here: on Linux, unless RING_SHARED_MEMORY=0."""
    return hasattr(os, "memfd_create") and config.SHARED_MEMORY.get()


def shared_memory_domain() -> str:
    """Text that is equal for two processes exactly if they can open each other's segments.

    Processes in different containers of one machine differ in their process-id namespace.
    """
    if not is_available():
        return f"{os.uname().nodename}/unshared/{os.getpid()}"
    return f"{os.uname().nodename}/{boot_id()}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


class _Range(NamedTuple):
    """What a forked child finds at an address."""

    address: int
    nbytes: int
    is_copied: bool


#: The mappings that forked children do not share; a mapping lives as long as the last view of it.
_in_children: weakref.WeakKeyDictionary[mmap.mmap, _Range] = weakref.WeakKeyDictionary()
#: Copies during a fork, and the lock of the thread that forks.
_copies: list[tuple[_Range, Bytes | None]] = []
_forking = threading.RLock()
_libc = ctypes.CDLL(None, use_errno=True)
_MAP_FIXED, _PROT_NONE = 0x10, 0  # which the mmap module does not offer


def _before_fork() -> None:
    _forking.acquire()
    _copies[:] = [
        (where, np.ctypeslib.as_array((ctypes.c_uint8 * where.nbytes).from_address(where.address)).copy())
        if where.is_copied
        else (where, None)
        for where in list(_in_children.values())
        if where.nbytes
    ]


def _after_fork_in_parent() -> None:
    _copies.clear()
    _forking.release()


def _after_fork_in_child() -> None:
    for where, copy in _copies:
        protection = _PROT_NONE if copy is None else mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if _map(where.address, where.nbytes, protection, flags, -1, 0) != where.address:
            os.write(2, b"ring_plugins: no memory for a forked child's copy of the gradients; the child ends.\n")
            os._exit(1)
        if copy is not None:
            ctypes.memmove(where.address, copy.ctypes.data, where.nbytes)
    _copies.clear()
    _in_children.clear()  # now ordinary memory
    _forking.release()


if sys.platform == "linux":
    _map = _libc.mmap
    _map.restype = ctypes.c_void_p
    _map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _above_standard_streams(fd: int) -> int:
    """The same file, numbered above 2: in a child, a lower number may become the standard stream that was closed."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _is_segment(fd: int) -> bool:
    """Whether an open file is a segment, and none of a user's own files, which could be mapped and overwritten, too."""
    return os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME} ")


class Segment:
    """A mapping of one shared segment.

    Attributes:
        array: the whole segment as a 1-d uint8 numpy array; views of it keep the mapping alive.
        fd: the open file, or -1 after `close_file`.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = -1  # a file that cannot be mapped is not this object's to close
        self.nbytes = nbytes
        self._mapping = mmap.mmap(fd, max(nbytes, 1))
        self.fd = fd
        self.array: Bytes = np.frombuffer(self._mapping, dtype=np.uint8, count=nbytes)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Create a segment filled with zeros.

        Raises:
            SharedMemoryError: this is not Linux, or memory or file descriptors have run out.
        """
        if not is_available():
            raise SharedMemoryError("shared memory needs Linux and RING_SHARED_MEMORY not 0.")
        try:
            fd = _above_standard_streams(os.memfd_create(_NAME))
            try:
                os.ftruncate(fd, max(nbytes, 1))
                return cls(fd, nbytes)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise SharedMemoryError(f"cannot create a shared segment of {nbytes} bytes: {error}.") from error

    @classmethod
    def inherited(cls, fd: int, nbytes: int) -> Segment:
        """Map the segment that the parent of this process created and passed on.

        Programs that this process starts do not inherit it.

        Raises:
            SharedMemoryError: the number belongs to no open file, or to one that is not such a segment.
        """
        try:
            if not _is_segment(fd) or os.fstat(fd).st_size < nbytes:
                raise SharedMemoryError(f"file {fd} is not a segment of {nbytes} bytes")
            os.set_inheritable(fd, False)
            return cls(fd, nbytes)
        except OSError as error:
            raise SharedMemoryError(str(error)) from error

    @classmethod
    def open(cls, address: Address, rank: int) -> Segment:
        """Map the segment that world rank `rank` created.

        Raises:
            SharedMemoryError: the other process no longer exists, or this one may not access it.
        """
        pid, number, nbytes = address
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                if not _is_segment(fd) or os.fstat(fd).st_size != max(nbytes, 1):
                    raise OSError(errno.EBADF, "it is another file by now")
                return cls(fd, nbytes)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise SharedMemoryError(
                f"cannot map the memory of rank {rank} (process {pid}): {error}. If that process is "
                "alive, this one may not access it (different users or capabilities): set RING_SHARED_MEMORY=0 on all "
                "ranks."
            ) from error

    @property
    def address(self) -> Address:
        return os.getpid(), self.fd, self.nbytes

    def own_copy_in_children(self) -> None:
        """Let a child that is forked while this memory is in use have a copy of it, at the same address."""
        _in_children[self._mapping] = _Range(address_of(self.array), self.nbytes, is_copied=True)

    def hide_from_children(self) -> None:
        """Let a child that is forked while this memory is in use have no access to it."""
        _in_children[self._mapping] = _Range(address_of(self.array), self.nbytes, is_copied=False)

    def close_file(self) -> None:
        """Close the file once everyone has mapped it; the mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class SharedBuffer:
    """Memory of equal size on every rank of a host, mapped by all of them.

    Args:
        parts: every local rank's part in rank order.
        rank: of this process among them.
        own: the segment of its part, whose file stays open for ranks that join later; None if none can.

    Attributes:
        array: this rank's part, 1-d uint8.
        parts: every local rank's part in rank order, this rank's included.
        own: as given.
    """

    def __init__(self, parts: Sequence[Bytes], rank: int, own: Segment | None = None) -> None:
        self.parts = list(parts)
        self.array = self.parts[rank]
        self.own = own
        self._start = address_of(self.array)

    def replace(self, parts: Sequence[Bytes], rank: int) -> None:
        """Take new mappings of the others' parts; this rank's stays where it is."""
        self.parts = [self.array if place == rank else part for place, part in enumerate(parts)]

    def keep(self, places: Sequence[int]) -> None:
        """Drop the parts of all ranks but those at `places`."""
        self.parts = [self.parts[place] for place in places]

    def offset_of(self, array: np.ndarray[Any, Any]) -> int | None:
        """Bytes from the start of this buffer to `array`, or None if it lies elsewhere."""
        offset = address_of(array) - self._start
        return offset if offset >= 0 and offset + array.nbytes <= self.array.nbytes else None


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Memory address of the first element."""
    address: int = array.__array_interface__["data"][0]
    return address


class _FenceLock(threading.local):
    """A lock for each thread: with one for all, two threads fencing at once would release an unlocked lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()


_fence = _FenceLock()


def _publish_weakly_ordered() -> None:
    """Order memory accesses: all loads and stores so far happen before any that follow.

    On processors that reorder memory accesses (Arm, POWER) releasing and acquiring a lock is a full fence. x86 keeps
    stores in order, and loads in order, without a fence.
    """
    lock = _fence.lock
    lock.release()
    lock.acquire()


def _publish_ordered() -> None:
    """Does nothing: x86 makes stores visible in program order."""


#: Whether `publish` does anything, for callers to whom even the call matters.
is_weakly_ordered = platform.machine() not in ("x86_64", "AMD64", "i686")
publish = _publish_weakly_ordered if is_weakly_ordered else _publish_ordered

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("ring_plugins runs on little-endian machines only.")


#: Number of the system call by machine, part of Linux's stable interface.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98}
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1
_NAP = 50e-6

_number = _NUMBERS.get(platform.machine()) if sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8 else None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if _number is not None:
    _syscall = ctypes.CDLL(None).syscall  # releases the GIL while it sleeps
    _call, _wait, _wake, _all = (
        ctypes.c_long(_number),
        ctypes.c_int(_WAIT),
        ctypes.c_int(_WAKE),
        ctypes.c_int(_EVERYONE),
    )

    def sleep_while(address: int, value: int, seconds: float) -> None:
        """Sleep until `wake` is called for the address, unless the word there has another value.

        Args:
            address: of the word, aligned to 4 bytes; the low 32 bits of a little-endian 64-bit number will do.
            value: what the caller has seen there; only its low 32 bits are compared.
            seconds: longest sleep. Signals end it early, and so do spurious wake-ups.
        """
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        _syscall(_call, ctypes.c_void_p(address), _wait, ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.byref(limit))

    def wake(address: int) -> None:
        """Wake all processes and threads that sleep on this word."""
        _syscall(_call, ctypes.c_void_p(address), _wake, _all)

else:  # pragma: no cover

    def sleep_while(address: int, value: int, seconds: float) -> None:
        """Sleep briefly: there is no futex."""
        time.sleep(min(seconds, _NAP))

    def wake(address: int) -> None:
        """Do nothing: sleepers soon look again."""
