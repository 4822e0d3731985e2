"""Which rank updates what: the slices of a sharded optimizer.

**Problem.** After gradients were averaged every rank computes the same update of all parameters, and keeps the same
optimizer state. n ranks do the work n times, and hold n copies of the state.

**Idea** (ZeRO stage 1: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models").
Every rank updates a slice of the parameters and keeps the state of that slice only. Then an all-gather gives everyone
the other slices. An update that treats each element on its own gives the same numbers in slices as in one piece.

**Cuts.** Parameters are put into rounds, one all-gather each. A large tensor is a round of its own and is gathered
where it lies; small ones are packed into a round of up to a bucket's size. Each round is cut into one range per rank,
all of the same size up to a cache line. A range may begin and end inside a tensor, so every rank has 1/n of each
round, whatever the sizes of the tensors and whichever of them are frozen. For updates that need whole tensors, each
tensor has one owner; the largest are assigned first, to the rank that has least. If some elements have to stay
together, such as the rows of a table of which only some rows have gradients, cuts move to the nearest place between.

All this is arithmetic on sizes, the same on all ranks.

Before an update the ranks compare what it depends on (`UpdateComparison`): parts of different updates do not fit
together. After it, everyone's slices are gathered (`SliceGather`).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.arrays.memory import HostMemory, Memory, slices
from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.fusion import BUCKET_BYTES, DIRECT_BYTES, BucketSizes, Entry, FusionPlan

#: Small tensors travel in rounds of this size, which is also the most memory that packing them takes.
ROUND_SIZES = BucketSizes(BUCKET_BYTES, BUCKET_BYTES, DIRECT_BYTES)


@dataclass(frozen=True)
class Piece:
    """A range of a tensor.

    Attributes:
        entry: the tensor, as an index into the plan's entries.
        start, stop: elements of the tensor, in the order in which they lie in memory.
        offset: where the range lies among the elements of the round.
    """

    entry: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Round:
    """Tensors of one dtype whose slices are gathered by one all-gather.

    Attributes:
        is_direct: whether it is one tensor, gathered where it lies.
        entries: its tensors, in the order in which they are packed.
        counts: by rank, elements of its slice.
        pieces: by rank, its slice.
    """

    is_direct: bool
    entries: tuple[int, ...]
    counts: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def count(self) -> int:
        """Elements of all slices."""
        return sum(self.counts)


def plan_rounds(
    plan: FusionPlan, size: int, whole_tensors: bool = False, grains: Sequence[int] | None = None
) -> list[Round]:
    """Cut the tensors of a plan, made with `ROUND_SIZES`, into one slice for each rank.

    Args:
        plan: the tensors, and which of them are large.
        size: number of ranks.
        whole_tensors: whether a tensor belongs to one rank as a whole.
        grains: by tensor, how many elements from the first on stay together, then the same number again; 1 by default.
    """
    owners = _owners(plan.entries, size) if whole_tensors else None
    rounds = []
    for bucket in plan.buckets:
        rounds += [_round([entry], plan.entries, size, owners, grains, is_direct=True) for entry in bucket.direct]
        packed = [entry for entry in bucket.entries if entry not in bucket.direct]
        if owners is not None:
            packed.sort(key=owners.__getitem__)  # those of one owner beside each other
        if packed:
            rounds.append(_round(packed, plan.entries, size, owners, grains, is_direct=False))
    return rounds


def _owners(entries: Sequence[Entry], size: int) -> list[int]:
    """By tensor the rank that updates it."""
    owners, filled = [0] * len(entries), [0] * size
    nbytes = [entry.count * STORAGE[entry.dtype].itemsize for entry in entries]
    for entry in sorted(range(len(entries)), key=lambda i: (-nbytes[i], i)):
        owners[entry] = owner = filled.index(min(filled))
        filled[owner] += nbytes[entry]
    return owners


def _round(
    members: Sequence[int],
    entries: Sequence[Entry],
    size: int,
    owners: Sequence[int] | None,
    grains: Sequence[int] | None,
    is_direct: bool,
) -> Round:
    if owners is None:
        total = sum(entries[entry].count for entry in members)
        ends = [each.stop for each in slices(total, size, STORAGE[entries[members[0]].dtype].itemsize)]
        if grains is not None:
            ends = [_between_grains(end, members, entries, grains) for end in ends]
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    else:
        counts = [sum(entries[entry].count for entry in members if owners[entry] == rank) for rank in range(size)]
    pieces: list[list[Piece]] = [[] for _ in range(size)]
    ends = list(itertools.accumulate(counts))
    offset = 0
    for entry in members:
        start = 0
        if not entries[entry].count:  # an optimizer keeps state for it all the same
            pieces[0].append(Piece(entry, 0, 0, offset))
        while start < entries[entry].count:
            rank = next(rank for rank, end in enumerate(ends) if offset < end)
            stop = min(entries[entry].count, start + ends[rank] - offset)
            pieces[rank].append(Piece(entry, start, stop, offset))
            offset, start = offset + stop - start, stop
    return Round(is_direct, tuple(members), tuple(counts), tuple(map(tuple, pieces)))


def _between_grains(end: int, members: Sequence[int], entries: Sequence[Entry], grains: Sequence[int]) -> int:
    """Move a cut among the packed elements of a round to the nearest one that keeps grains whole."""
    first = 0
    for entry in members:
        if end <= first + entries[entry].count:
            return first + round((end - first) / grains[entry]) * grains[entry]
        first += entries[entry].count
    return end


class UpdateComparison:
    """Compares among the ranks what a sharded update depends on.

    Args:
        communicator: must have no other use.
        remedy: ends the text of the error.
    """

    def __init__(self, communicator: Communicator[Any], remedy: str) -> None:
        self._communicator, self._remedy = communicator, remedy
        self._all = HostMemory(np.zeros(communicator.size, np.int64), "int64")
        self._own = HostMemory(np.zeros(1, np.int64), "int64")

    def differs(self, description: int) -> bool:
        """Whether a number that describes the next update differs among the ranks. Collective."""
        self._own.array[0] = description
        self._communicator.all_gather(self._own, self._all, [1] * self._communicator.size)
        return bool((self._all.array != description).any())

    def explain(self, own: Mapping[str, object]) -> MismatchError | None:
        """The error that names the first thing, of all that updates depend on, that differs; None if none does.

        Collective.
        """
        by_rank = self._communicator.all_gather_object(dict(own), "what a sharded update depends on")
        for name in own:
            values = [theirs.get(name, "missing") for theirs in by_rank]
            if len(set(map(repr, values))) > 1:
                return MismatchError(
                    f"a sharded update differs among the ranks: {name} is {values}, in rank order. {self._remedy}"
                )
        return None


class Arrays(Protocol):
    """1-d arrays in one kind of memory, which are cut as `array[start:stop]`."""

    def empty(self, count: int, dtype: str) -> Any:
        """New memory."""

    def memory(self, array: Any, dtype: str) -> Memory:
        """An array as a communicator takes it."""

    def copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Overwrite each target with its source."""


class HostArrays:
    """numpy's, of the types in which it stores dtypes."""

    def empty(self, count: int, dtype: str) -> Array:
        return np.empty(count, STORAGE[dtype])

    def memory(self, array: Array, dtype: str) -> HostMemory:
        return HostMemory(array, dtype)

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target[:] = source


class SliceGather:
    """Gathers the slices of all ranks: a large tensor where it lies, small ones through a buffer.

    Args:
        plan: the tensors.
        rounds: how they are gathered.
        communicator: must have no other use.
        in_place: whether a rank's own slice lies where it belongs in the whole tensors.
        arrays: the kind of memory that they are in.
    """

    def __init__(
        self,
        plan: FusionPlan,
        rounds: Sequence[Round],
        communicator: Communicator[Any],
        in_place: bool = False,
        arrays: Arrays | None = None,
    ) -> None:
        self._rounds, self._communicator, self._in_place = rounds, communicator, in_place
        self._arrays = arrays or HostArrays()
        #: By round and rank the tensor of each piece, where the piece lies in it, and where in the buffer.
        self._places = [
            [
                [(p.entry, slice(p.start, p.stop), slice(p.offset, p.offset + p.stop - p.start)) for p in pieces]
                for pieces in one.pieces
            ]
            for one in rounds
        ]
        self._dtypes = [plan.entries[one.entries[0]].dtype for one in rounds]
        counts: dict[str, int] = {}
        for one, dtype in zip(rounds, self._dtypes, strict=True):
            if not one.is_direct:
                counts[dtype] = max(one.count, counts.get(dtype, 0))
        self._buffers = {dtype: self._arrays.empty(count, dtype) for dtype, count in counts.items()}

    def run(self, number: int, present: Container[int], wholes: Mapping[int, Any], own: Mapping[int, Any]) -> None:
        """Gather the tensors of a round. Collective.

        Args:
            number: of the round.
            present: its tensors that were updated, the same on all ranks, and at least one.
            wholes: by tensor, an array over all of its memory.
            own: by tensor, this rank's slice; with `in_place`, a view of `wholes`.
        """
        one, dtype, communicator, arrays = self._rounds[number], self._dtypes[number], self._communicator, self._arrays
        first = sum(one.counts[: communicator.rank])
        stop = first + one.counts[communicator.rank]
        if one.is_direct:
            (i,) = one.entries
            mine = own[i] if i in own else wholes[i][first:stop]
            communicator.all_gather(arrays.memory(mine, dtype), arrays.memory(wholes[i], dtype), one.counts)
            return
        packed, places = self._buffers[dtype][: one.count], self._places[number]
        mine = [(i, place) for i, _, place in places[communicator.rank] if i in own]
        arrays.copy([packed[place] for _, place in mine], [own[i] for i, _ in mine])
        communicator.all_gather(arrays.memory(packed[first:stop], dtype), arrays.memory(packed, dtype), one.counts)
        fetched = [
            each
            for rank, pieces in enumerate(places)
            if rank != communicator.rank or not self._in_place
            for each in pieces
            if each[0] in present
        ]
        arrays.copy([wholes[i][part] for i, part, _ in fetched], [packed[place] for _, _, place in fetched])
