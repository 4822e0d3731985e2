"""Tensor fusion: many small gradients travel together in a few large buckets.

**Problem.** A model has hundreds of gradients, most of them small. Every all-reduce costs tens of microseconds whatever
its size, so one call a gradient wastes most of the time, while one call for all of them could not start before backward
ends.

**Idea** (PyTorch's DistributedDataParallel, Horovod's fusion buffer). Gradients are put into buckets of a fixed size in
the order in which backward produces them, last layer first, and each bucket is reduced by one call as soon as it is
full. Which gradient goes where is computed from the model alone, once more from the order of the first backward
(torch does), and compared among the ranks each time. So no rank ever has to ask the others what comes next; Horovod's
coordinator does that in every cycle.

**Large tensors** gain nothing from being copied into a bucket. They are reduced where they are, in their bucket's turn.

**Missing gradients.** A rank may lack a gradient that another rank has. So each bucket ends with one flag per tensor,
1 if this rank has the gradient. The flags are averaged along with the rest: one above 0 tells every rank that some rank
has the gradient.

**Control numbers** follow the flags of the last bucket, if asked for. They tell every rank what has happened on some
rank in this pass, such as a backward that raised, at no cost of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple, Protocol

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.arrays.memory import CACHE_LINE, HostMemory, Memory
from ring_plugins.core.base.errors import ArgumentError, MismatchError, name_ranks
from ring_plugins.core.collectives.api import Communicator

MIB = 1024 * 1024
#: Large enough that the cost of a call does not matter, small enough that buckets leave while most of backward is still
#: to come (the size that PyTorch's DistributedDataParallel settled on).
BUCKET_BYTES = 25 * MIB
#: The first bucket is small, so that communication starts early.
FIRST_BUCKET_BYTES = MIB
#: From this size on, copying a tensor into the bucket costs more memory traffic than it saves in calls (measured:
#: docs/performance.md).
DIRECT_BYTES = MIB


class BucketSizes(NamedTuple):
    """When buckets are closed, and which tensors stay outside of them.

    Attributes:
        bucket_bytes: a bucket is closed when it has reached this size.
        first_bucket_bytes: the same for the first bucket of each dtype.
        direct_bytes: tensors of this size and more are reduced where they are; None for none.
    """

    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    direct_bytes: int | None = DIRECT_BYTES

    def checked(self) -> BucketSizes:
        """These sizes.

        Raises:
            ArgumentError: one is not a positive number.
        """
        given: dict[str, Any] = {"bucket_bytes": self.bucket_bytes, "first_bucket_bytes": self.first_bucket_bytes}
        for name, size in given.items():
            if not isinstance(size, Real) or size < 1:
                raise ArgumentError(f"{name}={size!r} is not a positive number of bytes.")
        return self

    def __str__(self) -> str:
        direct = "no tensors" if self.direct_bytes is None else f"tensors of {self.direct_bytes / MIB:g} MiB and more"
        return f"buckets of {self.bucket_bytes / MIB:g} MiB, {direct} alone"


DEFAULT_SIZES = BucketSizes()


@dataclass(frozen=True)
class Entry:
    """A tensor of a plan.

    Attributes:
        name: for error texts.
        dtype: element type.
        count: number of elements.
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
        entries: its tensors, as indices into the plan's entries.
        offsets: element at which each of them starts, on a cache line; -1 for the direct ones.
        direct: the entries that are reduced where they are, outside of the bucket's memory.
        flags: element at which the flags begin, one for each tensor; the control numbers of the last bucket follow.
        count: number of elements, all of these included.
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
        """Bytes of the bucket's own memory, without direct tensors."""
        return self.count * STORAGE[self.dtype].itemsize


class FusionPlan:
    """Assigns tensors to buckets: pure arithmetic, the same on all ranks for the same entries.

    Args:
        entries: tensors in the order of the model. The last ones get their gradients first, so buckets are filled from
            the end.
        sizes: of the buckets.
        control: how many control numbers the last bucket has. With any, there is a bucket even without tensors.
        order: all indices into `entries`, first gradient first; None for the order described above.

    Raises:
        ArgumentError: sizes are not positive.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        sizes: BucketSizes = DEFAULT_SIZES,
        control: int = 0,
        order: Sequence[int] | None = None,
    ) -> None:
        self.entries, self.sizes, self.control = tuple(entries), sizes.checked(), control
        self.order = tuple(reversed(range(len(self.entries))) if order is None else order)
        self.buckets = tuple(self._fill())

    def _fill(self) -> list[Bucket]:
        open_: dict[str, list[int]] = {}
        filled: dict[str, int] = {}
        limit: dict[str, int] = {}
        groups: list[tuple[str, list[int]]] = []
        for i in self.order:
            entry = self.entries[i]
            group = open_.setdefault(entry.dtype, [])
            group.append(i)
            filled[entry.dtype] = filled.get(entry.dtype, 0) + _nbytes(entry)
            if filled[entry.dtype] >= limit.get(entry.dtype, self.sizes.first_bucket_bytes):
                groups.append((entry.dtype, open_.pop(entry.dtype)))
                filled[entry.dtype], limit[entry.dtype] = 0, self.sizes.bucket_bytes
        groups.extend(open_.items())
        if not groups and self.control:
            groups.append(("float32", []))
        control = [0] * (len(groups) - 1) + [self.control]
        return [self._lay_out(index, *group, control[index]) for index, group in enumerate(groups)]

    def _lay_out(self, index: int, dtype: str, group: list[int], control: int) -> Bucket:
        line = CACHE_LINE // STORAGE[dtype].itemsize
        limit = self.sizes.direct_bytes
        direct = tuple(i for i in group if limit is not None and _nbytes(self.entries[i]) >= limit)
        offsets, end = [], 0
        for i in group:
            if i in direct:
                offsets.append(-1)
            else:
                offsets.append(end)
                end += -(-self.entries[i].count // line) * line
        count = end + -(-(len(group) + control) // line) * line
        return Bucket(index, dtype, tuple(group), tuple(offsets), direct, end, count)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets together, without direct tensors."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def gaps(self, bucket: Bucket) -> list[int]:
        """The elements of a bucket that fill the last cache line of a tensor, and belong to none."""
        line = CACHE_LINE // STORAGE[bucket.dtype].itemsize
        counts = [self.entries[i].count for i in bucket.entries]
        return [
            gap
            for offset, count in zip(bucket.offsets, counts, strict=True)
            if offset >= 0
            for gap in range(offset + count, offset + -(-count // line) * line)
        ]

    def buckets_with(self, sizes: BucketSizes) -> tuple[Bucket, ...]:
        """The buckets that the same tensors would have with other sizes."""
        return FusionPlan(self.entries, sizes, self.control, self.order).buckets

    def fills_as(self, order: Sequence[int]) -> bool:
        """Whether this order of the entries would put the same tensors into the same buckets."""
        other = FusionPlan(self.entries, self.sizes, self.control, order).buckets
        return [set(bucket.entries) for bucket in self.buckets] == [set(bucket.entries) for bucket in other]

    @cached_property
    def fingerprint(self) -> str:
        """A text that is equal exactly for equal plans."""
        return hashlib.sha256(repr((tuple(self.sizes), self.entries, self.order)).encode()).hexdigest()

    def check_equal(self, communicator: Communicator[Any]) -> None:
        """Compare the plans of all ranks; collective.

        Raises:
            MismatchError: they differ; the text names the first tensor that does, and which ranks have what.
        """
        fingerprints = communicator.all_gather_object(self.fingerprint, "gradients to average")
        if len(set(fingerprints)) == 1:
            return
        plans = communicator.all_gather_object((self.entries, self.sizes), "gradients to average")
        raise MismatchError(_difference(plans, communicator.ranks))


def _nbytes(entry: Entry) -> int:
    return entry.count * STORAGE[entry.dtype].itemsize


def _difference(plans: Sequence[tuple[tuple[Entry, ...], BucketSizes]], ranks: Sequence[int]) -> str:
    """The error text: the first difference between the ranks' plans."""
    longest = max(len(entries) for entries, _ in plans)
    for i in range(longest):
        ranks_of: dict[str, list[int]] = {}
        for rank, (entries, _) in zip(ranks, plans, strict=True):
            text = "no such parameter"
            if i < len(entries):
                entry = entries[i]
                text = f"{entry.name} ({entry.count} x {entry.dtype}{', ' if entry.layout else ''}{entry.layout})"
            ranks_of.setdefault(text, []).append(rank)
        if len(ranks_of) > 1:
            parts = "; ".join(f"{name_ranks(some)}: {text}" for text, some in ranks_of.items())
            rounded = ", with the same compression and error_feedback" if "sent as" in parts else ""
            return f"the models differ. First at parameter {i}: {parts}. Build the same model on all ranks{rounded}."
    sizes = {rank: tuple(sizes) for rank, (_, sizes) in zip(ranks, plans, strict=True)}
    return f"bucket sizes {BucketSizes._fields} differ by rank: {sizes}. Pass the same on all ranks."


class BucketMemory(Protocol):
    """The memory of a plan's buckets.

    Attributes:
        plan: the plan.
        memories: the memory of each bucket.
    """

    @property
    def plan(self) -> FusionPlan: ...

    @property
    def memories(self) -> Sequence[Memory]: ...

    def release(self) -> None:
        """Give the memory back; views of it stay valid as long as they live."""


class FusionBuffer:
    """A `BucketMemory` in host memory: one allocation of the kind that the communicator reduces fastest.

    Attributes:
        plan: the plan.
        memories: the memory of each bucket.
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
