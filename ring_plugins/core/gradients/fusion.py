"""Many small gradients in a few large buckets.

A bucket pays for small tensors, which it turns into one message. A large tensor gains nothing from being
copied into one: it is reduced where it is, in its turn, and only its flag travels with the small ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.arrays.memory import HostMemory, Memory
from ring_plugins.core.base.errors import ArgumentError, MismatchError, name_ranks
from ring_plugins.core.collectives.api import Communicator

MIB = 1024 * 1024
#: Large enough that the cost of a call does not count, small enough that the first bucket is on its way
#: while most of backward is still to come (the size PyTorch's DistributedDataParallel settled on).
BUCKET_BYTES = 25 * MIB
#: The first bucket is small, so that communication starts early.
FIRST_BUCKET_BYTES = MIB
#: From this size on a copy into the bucket costs more memory traffic than it saves calls (measured:
#: docs/performance.md).
DIRECT_BYTES = MIB
_ALIGN = 64


class BucketSizes(NamedTuple):
    """How gradients are put together to messages.

    Attributes:
        capacity: bytes at which a bucket is closed.
        first: the same for the first one, small so that communication starts early.
        crossover: bytes from which a tensor is reduced where it is instead of in a bucket.
    """

    capacity: int = BUCKET_BYTES
    first: int = FIRST_BUCKET_BYTES
    crossover: int | None = DIRECT_BYTES

    def __str__(self) -> str:
        alone = "none" if self.crossover is None else f"those of {self.crossover / MIB:g} MiB and more"
        return f"buckets of {self.capacity / MIB:g} MiB, tensors reduced alone: {alone}"


@dataclass(frozen=True)
class Entry:
    """A tensor that takes part.

    Attributes:
        name: for texts.
        dtype: element type.
        count: elements.
        layout: anything else that must be equal on all ranks, such as shape and strides.
    """

    name: str
    dtype: str
    count: int
    layout: str = ""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are reduced by one call.

    Attributes:
        index: its place in the order of reductions.
        dtype: element type of all its tensors.
        entries: which tensors, as indices into the plan's entries.
        offsets: element at which each of them starts, on a cache line; -1 for the direct ones.
        direct: those of the entries that are reduced where they are, outside of the bucket's memory.
        flags: element at which one number a tensor follows, 1 if this rank has a gradient for it and 0 if
            not. Averaged along with the rest they tell every rank what any rank has.
        count: elements in all.
    """

    index: int
    dtype: str
    entries: tuple[int, ...]
    offsets: tuple[int, ...]
    direct: tuple[int, ...]
    flags: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket's own memory."""
        return self.count * STORAGE[self.dtype].itemsize


class FusionPlan:
    """Which tensor goes where: pure arithmetic, the same on all ranks for the same entries.

    Args:
        entries: tensors in the order of the model; the last ones have their gradients first, so buckets
            are filled from the end.
        bucket_bytes: a bucket is closed when it has reached this size.
        first_bucket_bytes: the same for the first bucket of each dtype.
        direct_bytes: tensors of this size and more are reduced where they are; None for none.

    Raises:
        ArgumentError: sizes are not positive.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        direct_bytes: int | None = None,
    ) -> None:
        if bucket_bytes < 1 or first_bucket_bytes < 1:
            raise ArgumentError(
                f"bucket_bytes={bucket_bytes} and first_bucket_bytes={first_bucket_bytes} must be positive."
            )
        self.entries = tuple(entries)
        self.bucket_bytes, self.first_bucket_bytes, self.direct_bytes = bucket_bytes, first_bucket_bytes, direct_bytes
        self.buckets = tuple(self._fill())

    def _fill(self) -> list[Bucket]:
        open_: dict[str, list[int]] = {}
        filled: dict[str, int] = {}
        limit: dict[str, int] = {}
        groups: list[tuple[str, list[int]]] = []
        for i in reversed(range(len(self.entries))):
            entry = self.entries[i]
            group = open_.setdefault(entry.dtype, [])
            group.append(i)
            filled[entry.dtype] = filled.get(entry.dtype, 0) + _nbytes(entry)
            if filled[entry.dtype] >= limit.get(entry.dtype, self.first_bucket_bytes):
                groups.append((entry.dtype, open_.pop(entry.dtype)))
                filled[entry.dtype], limit[entry.dtype] = 0, self.bucket_bytes
        groups.extend(open_.items())
        return [self._lay_out(index, dtype, group) for index, (dtype, group) in enumerate(groups)]

    def _lay_out(self, index: int, dtype: str, group: list[int]) -> Bucket:
        line = _ALIGN // STORAGE[dtype].itemsize
        direct = tuple(
            i for i in group if self.direct_bytes is not None and _nbytes(self.entries[i]) >= self.direct_bytes
        )
        offsets, end = [], 0
        for i in group:
            if i in direct:
                offsets.append(-1)
            else:
                offsets.append(end)
                end += -(-self.entries[i].count // line) * line
        count = end + -(-len(group) // line) * line
        return Bucket(index, dtype, tuple(group), tuple(offsets), direct, end, count)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets' own memory."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def buckets_with(self, sizes: BucketSizes) -> tuple[Bucket, ...]:
        """The buckets that the same tensors would have with other sizes."""
        return FusionPlan(self.entries, *sizes).buckets

    @cached_property
    def fingerprint(self) -> str:
        """A text that is equal exactly for equal plans."""
        said = repr((self.bucket_bytes, self.first_bucket_bytes, self.direct_bytes, self.entries))
        return hashlib.sha256(said.encode()).hexdigest()

    def check_equal(self, communicator: Communicator[Any]) -> None:
        """Compare the plans of all ranks; collective.

        Raises:
            MismatchError: they differ; the text names the first tensor that does, and the ranks.
        """
        fingerprints = communicator.all_gather_object(self.fingerprint)
        if len(set(fingerprints)) == 1:
            return
        plans = communicator.all_gather_object((self.entries, self.bucket_bytes, self.first_bucket_bytes))
        raise MismatchError(_difference(plans, communicator.ranks))


def _nbytes(entry: Entry) -> int:
    return entry.count * STORAGE[entry.dtype].itemsize


def _difference(plans: Sequence[tuple[tuple[Entry, ...], int, int]], ranks: Sequence[int]) -> str:
    longest = max(len(entries) for entries, _, _ in plans)
    for i in range(longest):
        said: dict[str, list[int]] = {}
        for rank, (entries, _, _) in zip(ranks, plans, strict=True):
            text = "no such parameter"
            if i < len(entries):
                entry = entries[i]
                text = f"{entry.name} ({entry.count} x {entry.dtype}{', ' if entry.layout else ''}{entry.layout})"
            said.setdefault(text, []).append(rank)
        if len(said) > 1:
            parts = "; ".join(f"{name_ranks(r)}: {t}" for t, r in said.items())
            return f"the models differ. First at parameter {i}: {parts}. Build the same model on all ranks."
    sizes = {rank: plan[1:] for rank, plan in zip(ranks, plans, strict=True)}
    return f"bucket sizes (bucket_bytes, first_bucket_bytes) differ by rank: {sizes}. Pass the same on all ranks."


class BucketMemory(Protocol):
    """Where the buckets of a plan are.

    Attributes:
        plan: the plan.
        memories: for each bucket the memory that is reduced.
    """

    @property
    def plan(self) -> FusionPlan: ...

    @property
    def memories(self) -> Sequence[Memory]: ...

    def release(self) -> None:
        """Give the memory back; views of it stay valid as long as they live."""


class FusionBuffer:
    """One flat allocation that holds all buckets of a plan, in the memory the communicator reduces fastest.

    Attributes:
        plan: the plan.
        memories: for each bucket the memory that is reduced.
    """

    def __init__(self, plan: FusionPlan, communicator: Communicator) -> None:
        self.plan = plan
        self._communicator = communicator
        self._shared = communicator.allocate(plan.nbytes)
        self.memories: list[HostMemory] = []
        start = 0
        for bucket in plan.buckets:
            array = self._shared.array[start : start + bucket.nbytes].view(STORAGE[bucket.dtype])
            self.memories.append(HostMemory(array, bucket.dtype))
            start += bucket.nbytes

    def release(self) -> None:
        """Give the memory back; views of it stay valid as long as they live."""
        self._communicator.release(self._shared)
