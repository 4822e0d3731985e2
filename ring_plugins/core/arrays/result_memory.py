"""Memory for results that the caller gave none for, used again once nobody can see it any more.

**Problem.** malloc gives large memory back to the kernel as soon as it is freed, and the kernel clears it again, page
by page, when the next result is written. All-reducing a torch tensor of 100 MiB into new memory took 64 ms of processor
time and 25,601 page faults, into existing memory 9 ms and none (benchmarks/result_memory.py).

**Idea.** A result is handed out as a view of a lease: a ctypes array over memory that is kept here. Views, memoryviews,
DLPack capsules and the tensors that torch makes from numpy's arrays all refer to what they were made from, so the lease
lives as long as any of them. Once it is gone, nobody has a way to the memory, and the next result may take it.

A size is kept from its second use on, so a result that is needed once costs nothing for good. The memory that was used
longest ago goes first when there is more than `LIMIT`; a lease that somebody still holds keeps its own alive.

Considered and rejected: mallopt(3) with a higher M_TRIM_THRESHOLD. It changes how the whole process frees memory.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ring_plugins.core.arrays.memory import CACHE_LINE
from ring_plugins.core.base.types import Bytes

#: Smaller results come from malloc, which keeps what it needs for them.
SMALLEST = 1024 * 1024
#: Bytes that are kept, those of results in use included.
LIMIT = 256 * 1024 * 1024
#: Calls in which a size has to come again to be kept.
_REMEMBERED = 64


class ResultMemory:
    """Keeps memory of results; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in between
        self._blocks: list[_Block] = []  # used longest ago first
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)

    def new(self, nbytes: int) -> Bytes | None:
        """Uninitialized memory that nobody else sees, or None if malloc's will do."""
        if not SMALLEST <= nbytes <= LIMIT:
            return None
        with self._lock:
            came_before = nbytes in self._sizes
            self._sizes.append(nbytes)
            if not came_before:
                return None
            block = next((block for block in self._blocks if block.is_free(nbytes)), None)
            if block is None:
                block = _Block(nbytes)
            else:
                self._blocks.remove(block)
            self._blocks.append(block)
            while sum(block.memory.nbytes for block in self._blocks) > LIMIT:
                del self._blocks[0]
            return block.lease()

    def clear(self) -> None:
        """Keep nothing; results in use stay valid."""
        with self._lock:
            self._blocks.clear()
            self._sizes.clear()


class _Block:
    def __init__(self, nbytes: int) -> None:
        whole = np.empty(nbytes + CACHE_LINE, np.uint8)  # on huge pages, if it is large
        start = -whole.ctypes.data % CACHE_LINE
        self.memory = whole[start : start + nbytes]
        self._type = ctypes.c_char * nbytes
        self._lease: Callable[[], Any] = lambda: None

    def is_free(self, nbytes: int) -> bool:
        """Whether it has this size and nobody refers to it."""
        return self.memory.nbytes == nbytes and self._lease() is None

    def lease(self) -> Bytes:
        lease = self._type.from_buffer(self.memory)
        self._lease = weakref.ref(lease)
        return np.frombuffer(lease, np.uint8)


#: Of this process.
kept_results = ResultMemory()
