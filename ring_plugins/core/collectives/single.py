"""The communicator of one process: every collective is the identity."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ring_plugins.core.arrays.codec import Codec
from ring_plugins.core.arrays.dtypes import Op, check_reducible
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.collectives.api import Communicator, Statistics, Work
from ring_plugins.core.collectives.background import BackgroundWork
from ring_plugins.core.collectives.fingerprint import fingerprint, size_mismatch
from ring_plugins.core.collectives.validation import check_counts, check_own_count, check_rank
from ring_plugins.core.linux.shared_memory import SharedBuffer

T = TypeVar("T")


class SingleCommunicator(Communicator[HostMemory]):
    """A `Communicator` of size 1. `start` runs its function at once, in the calling thread.

    Args:
        name: for reports.
        world_rank: of this process.
    """

    def __init__(self, name: str, world_rank: int = 0) -> None:
        self.name, self.rank, self.size = name, 0, 1
        self.ranks: tuple[int, ...] = (world_rank,)
        self.statistics = Statistics()

    def all_reduce(self, memory: HostMemory, op: Op, codec: Codec | None = None) -> None:
        check_reducible(memory.dtype, op)
        if memory.source is not None:
            np.copyto(memory.array, memory.source)

    def broadcast(self, memory: HostMemory, root: int) -> None:
        check_rank(root, self)

    def all_gather(self, mine: HostMemory, out: HostMemory, counts: Sequence[int]) -> None:
        check_own_count(counts, mine.array.size, self, "input")
        check_counts(counts, out.array.size)
        np.copyto(out.array, mine.array)

    def reduce_scatter(self, full: HostMemory, out: HostMemory, counts: Sequence[int], op: Op) -> None:
        check_reducible(full.dtype, op)
        check_own_count(counts, out.array.size, self, "output")
        check_counts(counts, full.array.size)
        np.copyto(out.array, full.array)

    def all_to_all(
        self, send: HostMemory, send_counts: Sequence[int], out: HostMemory, out_counts: Sequence[int]
    ) -> None:
        check_counts(send_counts, send.array.size, "send_counts")
        check_counts(out_counts, out.array.size, "out_counts")
        if [*send_counts] != [*out_counts]:
            own = self.ranks[0]
            raise size_mismatch(self.name, fingerprint("all_to_all", send.dtype), own, send.nbytes, own, out.nbytes)
        np.copyto(out.array, send.array)

    def barrier(self) -> None:
        pass

    def broadcast_object(self, item: Any, root: int = 0, purpose: str = "") -> Any:
        check_rank(root, self)
        return item

    def all_gather_object(self, item: Any, purpose: str = "") -> list[Any]:
        return [copy.deepcopy(item)]

    def start(self, description: str, function: Callable[[], T], repeats: bool = False) -> Work[T]:
        return BackgroundWork.run_now(description, function, self.interrupt)

    def run_synchronously(self, description: str, function: Callable[[], T]) -> T:
        return function()

    def allocate(self, nbytes: int) -> SharedBuffer:
        return SharedBuffer([np.zeros(nbytes, np.uint8)], 0)
