"""The inputs of a pass, kept so that it can be repeated without ranks that were lost in it.

A step is whole or not at all: each of its averages is taken over the same ranks. So when a rank dies in the middle of a
pass, the survivors reduce its first buckets again, too. By then these hold averages, and the bucket under way holds
anything. The gradients themselves are needed, and there are three ways to have them:

- The plugin still has the tensors that it moved into the bucket, and moves them once more (`refill_by`).
- The average of a tensor is written elsewhere (`HostMemory.source`), so nothing overwrites the tensor.
- Anything else is copied before it is reduced: flags, control numbers, and gradients that accumulated where they are
  reduced. Only jobs that are to survive a loss pay for that.

What error feedback has noted in the pass is undone, too (`Codec.undo`).

A pass is over when its last barrier is passed. All survivors pass it, or none does (core/control/mesh.py), so no
rank steps with averages that another one lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.types import Array
from ring_plugins.core.gradients.fusion import Bucket


class SavedInputs:
    """What the buckets of a pass held before they were reduced."""

    def __init__(self) -> None:
        self._memories: dict[int, Sequence[HostMemory]] = {}  # by bucket, in this pass
        self._refills: dict[int, Callable[[], None]] = {}  # by bucket, in this pass
        self._copies: dict[tuple[int, int], Array] = {}  # by bucket and place in it; kept from pass to pass

    def refill_by(self, bucket: int, refill: Callable[[], None]) -> None:
        """Note before `keep` that the gradients in a bucket's own memory need no copy in this pass.

        Args:
            bucket: its index.
            refill: moves them there once more.
        """
        self._refills[bucket] = refill

    def keep(self, bucket: Bucket, memories: Sequence[HostMemory]) -> None:
        """Keep what a bucket holds.

        Args:
            bucket: which.
            memories: its own memory, and that of its direct tensors.
        """
        for place, memory in enumerate(memories):
            array = self._overwritten(bucket, place, memory)
            if array is None:
                continue
            copy = self._copies.get((bucket.index, place))
            if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
                copy = self._copies[bucket.index, place] = np.empty_like(array)
            np.copyto(copy, array)
        self._memories[bucket.index] = memories

    def restored(self, bucket: Bucket) -> Sequence[HostMemory] | None:
        """The memory of a bucket with what it held when it was kept; None if it was not kept in this pass."""
        memories = self._memories.get(bucket.index)
        for place, memory in enumerate(memories or ()):
            array = self._overwritten(bucket, place, memory)
            if array is not None:
                np.copyto(array, self._copies[bucket.index, place])
        if bucket.index in self._refills:
            self._refills[bucket.index]()
        return memories

    def _overwritten(self, bucket: Bucket, place: int, memory: HostMemory) -> Array | None:
        """The part of a memory that only a copy can restore."""
        if memory.source is not None:
            return None
        return memory.array[bucket.flags :] if place == 0 and bucket.index in self._refills else memory.array

    def clear(self) -> None:
        """Begin a new pass."""
        self._memories.clear()
        self._refills.clear()
