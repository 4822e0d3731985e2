"""Memory for results that the caller gave none for, used again once nobody can see it any more.

**Problem.** malloc gives large memory back to the kernel as soon as it is freed, and the kernel clears it again, page
by page, when the next result is written. All-reducing a torch tensor of 100 MiB into new memory took 64 ms of processor
time and 25,601 page faults, into existing memory 9 ms and none (benchmarks/result_memory.py).

**Idea.** A result is handed out as a view of a lease: a ctypes array over memory that is kept here. Views, memoryviews,
DLPack capsules and the tensors that torch makes from numpy's arrays all refer to what they were made from, so the lease
lives as long as any of them. Once it is gone, nobody has a way to the memory, and the next result may take it.

What is kept follows what is needed: a size from its second use on, each memory until `_REMEMBERED` results have gone
by without it, and never more than `LIMIT`; what was used longest ago goes first. A lease that somebody still holds
keeps its own memory alive.

Considered and rejected: to leave this to malloc, which keeps freed memory too (linux/process.py), but only if it is
glibc's, if the user has not set its thresholds, and if no block still in use lies behind it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from ring_plugins.core.base.types import Bytes

#: Smaller results come from malloc, which keeps what it needs for them.
SMALLEST = 1024 * 1024
#: Bytes that are kept, those of results in use included.
LIMIT = 256 * 1024 * 1024
#: Within so many results a size has to come again to be kept, and a memory to be used again to stay.
_REMEMBERED = 64


class ResultMemory:
    """Keeps memory of results; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in between
        self._blocks: list[_Block] = []  # used longest ago first
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)
        self._results = 0

    def new(self, nbytes: int) -> Bytes | None:
        """Uninitialized memory that nobody else sees, or None if malloc's will do."""
        if not SMALLEST <= nbytes <= LIMIT:
            return None
        with self._lock:
            came_before = nbytes in self._sizes
            self._sizes.append(nbytes)
            self._results += 1
            while self._blocks and self._blocks[0].used <= self._results - _REMEMBERED:
                del self._blocks[0]
            if not came_before:
                return None
            block = next((block for block in reversed(self._blocks) if block.is_free(nbytes)), None)
            if block is None:
                block = _Block(nbytes)
            else:
                self._blocks.remove(block)
            self._blocks.append(block)
            while sum(block.nbytes for block in self._blocks) > LIMIT:
                del self._blocks[0]
            block.used = self._results
            return block.lease()

    def clear(self) -> None:
        """Keep nothing; results in use stay valid."""
        with self._lock:
            self._blocks.clear()
            self._sizes.clear()


class _Block:
    """Pages of its own. Kept in malloc's heap, 36 MiB of blocks held up 160 MiB of holes between them."""

    def __init__(self, nbytes: int) -> None:
        try:
            self._pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"No memory for a result of {nbytes:,} bytes: {error.strerror}.") from error
        with suppress(OSError):  # a kernel without huge pages
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self._type = ctypes.c_char * nbytes
        self._lease: Callable[[], Any] = lambda: None
        self.used = 0  # by which result

    def is_free(self, nbytes: int) -> bool:
        """Whether it has this size and nobody refers to it."""
        return self.nbytes == nbytes and self._lease() is None

    def lease(self) -> Bytes:
        lease = self._type.from_buffer(self._pages)
        self._lease = weakref.ref(lease)
        return np.frombuffer(lease, np.uint8)


class LentMemory:
    """Memory for one result after another of the same size, each of which whoever gets it may keep.

    It is one block as long as nobody keeps a result until the next one is due.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._blocks: list[_Block] = []

    def new(self) -> Bytes:
        """Memory that nobody else sees, with any content."""
        free = [block for block in self._blocks if block.is_free(self._nbytes)]
        block = free[0] if free else _Block(self._nbytes)
        self._blocks = [block, *(other for other in self._blocks if other not in free)]
        return block.lease()


#: Of this process.
kept_results = ResultMemory()
