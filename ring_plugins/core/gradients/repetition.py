"""The inputs of a pass, kept so that it can be repeated without ranks that were lost in it.

A step is whole or not at all: each of its averages is taken over the same ranks. So when a rank dies in the middle of a
pass, the survivors reduce its first buckets again, too. By then these hold averages, and the bucket under way holds
anything. The gradients themselves are needed, and autograd does not have them any more: buckets and `p.grad` are the
same memory. So each bucket is copied before it is reduced, with its flags and control numbers. That costs one copy of
the gradients in time and memory, and only jobs that are to survive a loss pay for it.

A pass is over when its last barrier is passed. All survivors pass it, or none does (core/control/membership.py), so no
rank steps with averages that another one lacks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.types import Array


class KeptInputs:
    """Copies of what the buckets of a pass held before they were reduced."""

    def __init__(self) -> None:
        self._memories: dict[int, Sequence[HostMemory]] = {}  # by bucket, in this pass
        self._copies: dict[tuple[int, int], Array] = {}  # by bucket and place in it; kept from pass to pass

    def keep(self, bucket: int, memories: Sequence[HostMemory]) -> None:
        """Copy what a bucket holds."""
        for place, memory in enumerate(memories):
            copy = self._copies.get((bucket, place))
            if copy is None or copy.shape != memory.array.shape or copy.dtype != memory.array.dtype:
                copy = self._copies[bucket, place] = np.empty_like(memory.array)
            np.copyto(copy, memory.array)
        self._memories[bucket] = memories

    def restored(self, bucket: int) -> Sequence[HostMemory] | None:
        """The memory of a bucket with what it held when it was kept; None if it was not kept in this pass."""
        memories = self._memories.get(bucket)
        for place, memory in enumerate(memories or ()):
            np.copyto(memory.array, self._copies[bucket, place])
        return memories

    def clear(self) -> None:
        """Begin a new pass."""
        self._memories.clear()
