"""Gradients that a framework hands over as numpy arrays, averaged in buckets."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.fusion import Bucket, BucketSizes, Entry, FusionBuffer, FusionPlan
from ring_plugins.core.gradients.reducer import GradientReducer


class Buckets(Protocol):
    """One optimizer's gradients on their way; see `HostBuckets`."""

    plan: FusionPlan
    reducer: GradientReducer

    def give(self, indices: Sequence[int], gradients: Sequence[Any]) -> None: ...

    def finish(self) -> dict[int, Any]: ...

    def release(self) -> None: ...


class HostBuckets:
    """One optimizer's gradients on their way through shared memory.

    Small ones are copied into buckets. Large ones are read where the framework has them, and their averages are
    written to memory of their own: frameworks do not say who else reads a gradient, so it is never written to.

    A pass is any number of `give` and one `finish`. A bucket is on its way as soon as all of its gradients and of
    those before it were given; gradients that were not given count as zeros.

    Args:
        entries: all gradients in the order of the model's variables.
        communicator: reduces them; used by nothing else.
        bucket_bytes: size at which a bucket is closed.
        first_bucket_bytes: the same for the first one of each dtype.
        compression: how they travel between hosts.

    All ranks construct it together.

    Raises:
        MismatchError: the entries differ among ranks.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        communicator: Communicator,
        bucket_bytes: int,
        first_bucket_bytes: int,
        compression: Compression | None = None,
    ) -> None:
        if compression is not None:
            entries = [replace(entry, layout=f"{entry.layout}, {compression}") for entry in entries]
        self.plan = FusionPlan(entries, BucketSizes(bucket_bytes, first_bucket_bytes))
        self.plan.check_equal(communicator)
        self._buffer = FusionBuffer(self.plan, communicator)
        self.reducer = GradientReducer(self._buffer, communicator, self._fill, compression=compression)
        self._given: dict[int, Array] = {}
        self._forms: dict[int, tuple[np.dtype[Any], tuple[int, ...]]] = {}  # of all that were given in this pass
        self._places: list[Array] = [np.empty(0)] * len(entries)
        self._flags: list[Array] = []
        for bucket, memory in zip(self.plan.buckets, self._buffer.memories, strict=True):
            self._flags.append(memory.array[bucket.flags : bucket.flags + len(bucket.entries)])
            for i, offset in zip(bucket.entries, bucket.offsets, strict=True):
                is_direct, count = i in bucket.direct, entries[i].count
                self._places[i] = (
                    _aligned(count, memory.array.dtype) if is_direct else memory.array[offset : offset + count]
                )

    def give(self, indices: Sequence[int], gradients: Sequence[Array]) -> None:
        """Hand over gradients that are complete.

        Each is forgotten as soon as it has been read, at the latest when `finish` returns: where it was the last
        reference, its memory is there for the next gradient, and the system need not be asked for more.
        """
        for i, gradient in zip(indices, gradients, strict=True):
            self._given[i], self._forms[i] = gradient, (gradient.dtype, gradient.shape)
        for i in indices:
            self.reducer.mark_ready(i)

    def finish(self) -> dict[int, Array]:
        """Wait for every bucket.

        Returns:
            For each given index its average, with the gradient's shape and dtype: a view of memory that the
            next pass overwrites, on a cache line.

        Raises:
            MismatchError: a variable has a gradient on some ranks only.
            PeerFailed: another rank is gone.
        """
        forms = self._forms
        try:
            self.reducer.finish()
        finally:
            self._given, self._forms = {}, {}
        self._check_flags(forms)
        return {i: self._places[i].view(dtype).reshape(shape) for i, (dtype, shape) in forms.items()}

    def release(self) -> None:
        """Give the memory back."""
        self._buffer.release()

    def _fill(self, bucket: Bucket) -> list[HostMemory]:
        flags = self._flags[bucket.index]
        storage = STORAGE[bucket.dtype]
        one = _ONE_BFLOAT16 if bucket.dtype == "bfloat16" else 1
        direct: list[HostMemory] = []
        for place, i in enumerate(bucket.entries):
            average, gradient = self._places[i], self._given.pop(i, None)
            source = None
            if gradient is None:
                average[...] = 0
            elif i not in bucket.direct:
                np.copyto(average.reshape(gradient.shape), gradient.view(storage))
            else:
                source = np.ascontiguousarray(gradient).view(storage).reshape(-1)
            flags[place] = 0 if gradient is None else one
            if i in bucket.direct:
                direct.append(HostMemory(average, bucket.dtype, source))
        return direct

    def _check_flags(self, given: Container[int]) -> None:
        """Whether all ranks have the same gradients; a step that differs among them would part their weights."""
        for bucket, flags in zip(self.plan.buckets, self._flags, strict=True):
            one = _ONE_BFLOAT16 if bucket.dtype == "bfloat16" else 1
            for i, flag in zip(bucket.entries, flags.tolist(), strict=True):
                if flag != (one if i in given else 0):
                    has = "has" if i in given else "lacks"
                    raise MismatchError(
                        f"this rank {has} a gradient for {self.plan.entries[i].name}, and others do not agree. Let all "
                        "ranks compute gradients for the same variables in the same step."
                    )


def _aligned(count: int, dtype: np.dtype[Any]) -> Array:
    """Memory on a cache line, which TensorFlow takes over without a copy."""
    memory = np.empty(count * dtype.itemsize + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + count * dtype.itemsize].view(dtype)


_LINE = 64
#: The bits of 1.0; numpy stores bfloat16 as uint16.
_ONE_BFLOAT16 = 0x3F80
