"""Collectives inside one host, over shared memory.

Each member owns one segment: a control page, then a staging area of two halves. Uses of the staging area
alternate between its halves, and every use contains a barrier, so that a half is only written again after
all have passed the barrier of the use between, which they do after reading. No second barrier is needed to
protect it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_everywhere, reduce_into
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.types import Array, Bytes
from ring_plugins.core.collectives.fingerprint import Fingerprint
from ring_plugins.core.collectives.shm_barrier import PAGE, SharedMemoryBarrier
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.linux.shared_memory import Address, Segment, SharedBuffer

#: Bytes of one half of the staging area: two of them and the piece being summed stay in a core's cache.
HALF = 1024 * 1024
#: Up to this size every member reads everything: one barrier instead of two. Measured crossover.
SMALL = 32 * 1024
#: Bytes of each of the four areas through which chunks go to and from other hosts. Memory is taken when it is written.
ROOM = 4 * 1024 * 1024
_ALIGN = 64


@lru_cache(maxsize=1024)
def slices(count: int, parts: int, itemsize: int) -> tuple[slice, ...]:
    """Cut `count` elements into `parts` ranges that start on cache lines; late ones may be empty."""
    line = max(1, _ALIGN // itemsize)
    each = -(-count // parts // line) * line if count else 0
    each = max(each, line) if each * parts < count else each
    return tuple(slice(min(i * each, count), min((i + 1) * each, count)) for i in range(parts))


def create_segment() -> Segment:
    """The segment that a member brings to `Node`."""
    return Segment.create(PAGE + 2 * HALF + 4 * ROOM)


class SharedMemoryGroup:
    """The members of a communicator that live on this host; a `Transport` among them.

    Args:
        own: this member's segment from `create_segment`.
        addresses: all members' segments in rank order.
        ranks: their world ranks.
        position: which of them this process is.
        wait: how to wait.
        name: of the communicator.
    """

    def __init__(
        self, own: Segment, addresses: Sequence[Address], ranks: Sequence[int], position: int, wait: Wait, name: str
    ) -> None:
        self.position, self.size, self.name = position, len(ranks), name
        self._ranks = tuple(ranks)
        segments = [
            own if i == position else Segment.open(address, rank)
            for i, (address, rank) in enumerate(zip(addresses, ranks, strict=True))
        ]
        pages = [segment.array[:PAGE] for segment in segments]
        milestones = SharedMemoryBarrier(pages, ranks, position, wait, name)
        self.arrive, self.barrier_only, self.tell = milestones.arrive, milestones.barrier, milestones.tell
        self._arrive, self._barrier = milestones.arrive, milestones.barrier
        end = PAGE + 2 * HALF
        self._staging = [(segment.array[PAGE : PAGE + HALF], segment.array[PAGE + HALF : end]) for segment in segments]
        self.rooms = [segment.array[end:] for segment in segments]
        self._typed: dict[np.dtype[Any], tuple[list[Array], list[Array]]] = {}
        self._use = 0
        self._buffers: list[SharedBuffer] = []
        self._barrier()
        for segment in segments:
            segment.close_file()

    def _next_half(self) -> int:
        self._use ^= 1
        return self._use

    # Transport ------------------------------------------------------------------------------------

    def barrier(self, fingerprint: Fingerprint) -> None:
        self._arrive(fingerprint)

    def broadcast(self, data: Bytes, root: int, fingerprint: Fingerprint) -> None:
        for i, start in enumerate(range(0, max(data.size, 1), HALF)):
            piece = data[start : start + HALF]
            staged = self._staging[root][self._next_half()][: piece.size]
            if self.position == root:
                staged[:] = piece
            self._arrive(fingerprint) if i == 0 else self._barrier()
            if self.position != root:
                piece[:] = staged

    def all_gather(self, mine: Bytes, parts: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        for i, start in enumerate(range(0, max(1, *(part.size for part in parts)), HALF)):
            half = self._next_half()
            piece = mine[start : start + HALF]
            self._staging[self.position][half][: piece.size] = piece
            self._arrive(fingerprint) if i == 0 else self._barrier()
            for part, staging in zip(parts, self._staging, strict=True):
                piece = part[start : start + HALF]
                piece[:] = staging[half][: piece.size]

    def all_to_all(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        longest = np.array([max(part.size for part in outgoing)])
        everyones = np.empty(self.size, longest.dtype)
        self.all_gather(longest.view(np.uint8), np.split(everyones.view(np.uint8), self.size), fingerprint)
        room = HALF // self.size // _ALIGN * _ALIGN
        for start in range(0, int(everyones.max()), room):
            half = self._next_half()
            for i, part in enumerate(outgoing):
                piece = part[start : start + room]
                self._staging[self.position][half][i * room : i * room + piece.size] = piece
            self._barrier()
            for part, staging in zip(incoming, self._staging, strict=True):
                piece = part[start : start + room]
                at = self.position * room
                piece[:] = staging[half][at : at + piece.size]

    # Reductions -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, exchange: Callable[[Address], list[Address]]) -> SharedBuffer:
        """Memory that all members map and in which `all_reduce` works in place; collective."""
        own = Segment.create(nbytes)
        segments = [
            own if i == self.position else Segment.open(address, rank)
            for i, (address, rank) in enumerate(zip(exchange(own.address), self._ranks, strict=True))
        ]
        self._barrier()
        for segment in segments:
            segment.close_file()
        buffer = SharedBuffer([segment.array for segment in segments], self.position)
        self._buffers.append(buffer)
        return buffer

    def release(self, buffer: SharedBuffer) -> None:
        """Forget a buffer; its memory goes with the last view of it."""
        self._buffers.remove(buffer)

    def all_reduce(
        self, array: Array, op: Op, dtype: str, divisor: int, fingerprint: Fingerprint, source: Array | None = None
    ) -> None:
        """Reduce `array` of all members.

        Args:
            array: 1-d storage array, the same length everywhere, for the result.
            op, dtype, divisor: as in `reduce_into`.
            signature: of the operation.
            source: what this member adds; `array` itself by default.
        """
        source = array if source is None else source
        if array.nbytes <= SMALL:
            self._reduce_small(array, source, op, dtype, divisor, fingerprint)
            return
        shared = self.everyones(array)
        if shared is not None:
            if source is not array:
                np.copyto(array, source)
            self._reduce_shared(shared, op, dtype, divisor, fingerprint)
        else:
            self._reduce_staged(array, source, op, dtype, divisor, fingerprint)

    def everyones(self, array: Array) -> list[Array] | None:
        """The same memory of all members, if it lies in a buffer that they share."""
        for buffer in self._buffers:
            offset = buffer.offset_of(array)
            if offset is not None:
                return [part[offset : offset + array.nbytes].view(array.dtype) for part in buffer.parts]
        return None

    def _typed_staging(self, storage: np.dtype[Any]) -> tuple[list[Array], list[Array]]:
        """Both halves of everyone's staging area as arrays of a type; kept, since making views takes time."""
        typed = self._typed.get(storage)
        if typed is None:
            first, second = zip(*self._staging, strict=True)
            typed = [half.view(storage) for half in first], [half.view(storage) for half in second]
            self._typed[storage] = typed
        return typed

    def _own_first(self, parts: Sequence[Array]) -> list[Array]:
        return [parts[self.position], *(part for i, part in enumerate(parts) if i != self.position)]

    def _reduce_small(
        self, array: Array, source: Array, op: Op, dtype: str, divisor: int, fingerprint: Fingerprint
    ) -> None:
        """Everyone reads everything, in rank order, so that all get the same bits."""
        size, halves = array.size, self._typed_staging(array.dtype)
        staged = [half[:size] for half in halves[self._next_half()]]
        np.copyto(staged[self.position], source)
        self._arrive(fingerprint)
        reduce_into(array, staged, op, dtype, divisor)

    def _reduce_shared(self, parts: list[Array], op: Op, dtype: str, divisor: int, fingerprint: Fingerprint) -> None:
        """Each member reduces its slice of everyone's memory, and leaves the result in all of them."""
        self._arrive(fingerprint)
        cut = slices(parts[0].size, self.size, parts[0].itemsize)[self.position]
        reduce_everywhere(self._own_first([part[cut] for part in parts]), op, dtype, divisor)
        self._barrier()

    def _reduce_staged(
        self, array: Array, source: Array, op: Op, dtype: str, divisor: int, fingerprint: Fingerprint
    ) -> None:
        """Ordinary memory: each member puts what others reduce into its staging area, and finds the result there.

        Chunks take turns with the halves of the area, so that one barrier tells both that a chunk is staged and that
        the results of the one before are there. After it nobody but its owner touches the half of the latter.
        """
        step, (first, second) = HALF // array.itemsize, self._typed_staging(array.dtype)
        before: tuple[Array, Array, list[slice]] | None = None
        for i, start in enumerate(range(0, array.size, step)):
            chunk, mine = array[start : start + step], source[start : start + step]
            cuts = slices(chunk.size, self.size, chunk.itemsize)
            staged = second if self._next_half() else first
            own = staged[self.position]
            others = [cut for owner, cut in enumerate(cuts) if owner != self.position]
            for cut in others:
                np.copyto(own[cut], mine[cut])
            self._arrive(fingerprint) if i == 0 else self._barrier()
            _take_out(before)
            cut = cuts[self.position]
            areas = [area[cut] for j, area in enumerate(staged) if j != self.position]
            reduce_everywhere([chunk[cut], *areas], op, dtype, divisor, mine[cut])
            before = chunk, own, others
        self._barrier()
        _take_out(before)


def _take_out(reduced: tuple[Array, Array, list[slice]] | None) -> None:
    """Copy what others have reduced from the own staging area to where it belongs."""
    if reduced is not None:
        chunk, own, cuts = reduced
        for cut in cuts:
            np.copyto(chunk[cut], own[cut])
