"""All-reduce on several hosts: added up inside each host, between the hosts, and handed round inside each host.

The three happen at the same time, for different chunks of the data. Members of equal position on their hosts form a
lane and own one slice of every chunk, so a host's ranks share its network.

The part of an all-reduce between hosts that happens inside each host, chunk by chunk.

Members of a host take one step together for every chunk: the next chunk's numbers are added up over the host, each
slice by the member that owns it and sends it to other hosts, and an earlier chunk's results are handed to everyone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_into
from ring_plugins.core.arrays.codec import Codec, IdentityCodec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.algorithms import Pipeline, Reduction, choose_algorithm
from ring_plugins.core.collectives.fingerprint import Fingerprint
from ring_plugins.core.collectives.net_group import SMALL, NetworkGroup
from ring_plugins.core.collectives.shm_group import ROOM, SharedMemoryGroup, slices


class Sum(NamedTuple):
    """How numbers are combined inside the host.

    Attributes:
        op, dtype, divisor: as in `reduce_into`.
        owners: how many members own a slice of each chunk, the first ones.
        signature: of the operation.
    """

    op: Op
    dtype: str
    divisor: float
    owners: int
    fingerprint: Fingerprint


class IntraNodeStage(Protocol):
    """What the members of a host do together."""

    def step(self, new: slice | None, old: slice | None) -> None:
        """Leave the host's sum of the own slice of chunk `new` in the array, and everyone's results of chunk `old`."""

    def end(self) -> None:
        """After the last step: return when no other member touches this one's memory any more."""


def intra_node_stage(
    node: SharedMemoryGroup | None,
    array: Array,
    how: Sum,
    source: Array | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> IntraNodeStage:
    """The way that fits the memory.

    Args:
        node: the members of this host, None where this is the only one.
        array: 1-d storage array, for the result.
        how: see `Sum`.
        source: what this member adds; `array` itself by default.
        meanwhile: called while this member waits for others of its host.
    """
    shared = node.everyones(array) if node is not None else None
    if node is not None and shared is None:
        return _Staged(node, array, array if source is None else source, how, meanwhile)
    if source is not None:
        np.copyto(array, source)
    return _Single(array, how) if node is None or shared is None else _Shared(node, shared, how)


class _Single:
    """One member: nothing but its own numbers."""

    def __init__(self, array: Array, how: Sum) -> None:
        self._array, self._how = array, how

    def step(self, new: slice | None, old: slice | None) -> None:
        if new is not None and self._how.divisor != 1:
            piece = self._array[new]
            reduce_into(piece, [piece], self._how.op, self._how.dtype, self._how.divisor)

    def end(self) -> None:
        pass


class _Shared:
    """Memory that all members map: owners read and write everyone's, and nobody waits between the chunks."""

    def __init__(self, node: SharedMemoryGroup, parts: Sequence[Array], how: Sum) -> None:
        self._node, self._parts, self._how = node, parts, how
        node.arrive(how.fingerprint)

    def _own(self, chunk: slice) -> list[Array]:
        """The own slice of a chunk in every member's memory, the own memory first."""
        position = self._node.position
        pieces = [part[chunk] for part in self._parts]
        cut = slices(pieces[0].size, self._how.owners, pieces[0].itemsize)[position]
        return [pieces[position][cut], *(piece[cut] for i, piece in enumerate(pieces) if i != position)]

    def step(self, new: slice | None, old: slice | None) -> None:
        if self._node.position >= self._how.owners:
            return
        if new is not None:
            pieces = self._own(new)
            reduce_into(pieces[0], pieces, self._how.op, self._how.dtype, self._how.divisor)
        if old is not None:
            first, *others = self._own(old)
            for other in others:
                np.copyto(other, first)

    def end(self) -> None:
        self._node.barrier_only()


class _Staged:
    """Ordinary memory: what others add up goes through areas that all map, and so do results; one barrier a step.

    There are two areas for each, taken in turn. One is written again two steps later, after a barrier that everyone
    passes only when done with reading it.
    """

    def __init__(
        self, node: SharedMemoryGroup, array: Array, source: Array, how: Sum, meanwhile: Callable[[], None] | None
    ) -> None:
        self._node, self._array, self._source, self._how = node, array, source, how
        self._meanwhile = meanwhile
        quarter = ROOM // array.itemsize
        areas = [room.view(array.dtype) for room in node.rooms]
        self._inputs = [[area[i * quarter : (i + 1) * quarter] for area in areas] for i in (0, 1)]
        self._results = [[area[i * quarter : (i + 1) * quarter] for area in areas] for i in (2, 3)]
        self._turn = 0
        self._arrived = False

    def step(self, new: slice | None, old: slice | None) -> None:
        if new is None and old is None:  # for all members of the host
            return
        node, position = self._node, self._node.position
        self._turn ^= 1
        inputs, results = self._inputs[self._turn], self._results[self._turn]
        chunk, chunk_cuts = self._cut(new)
        mine = self._source[new] if new is not None else chunk
        result, result_cuts = self._cut(old)
        for owner, cut in enumerate(chunk_cuts):
            if owner != position:
                np.copyto(inputs[position][cut], mine[cut])
        if position < len(result_cuts):
            cut = result_cuts[position]
            np.copyto(results[position][cut], result[cut])
        if self._arrived:
            node.barrier_only(meanwhile=self._meanwhile)
        else:
            node.arrive(self._how.fingerprint, self._meanwhile)
            self._arrived = True
        if position < len(chunk_cuts):
            cut = chunk_cuts[position]
            others = [area[cut] for i, area in enumerate(inputs) if i != position]
            reduce_into(chunk[cut], [mine[cut], *others], self._how.op, self._how.dtype, self._how.divisor)
        for owner, cut in enumerate(result_cuts):
            if owner != position:
                np.copyto(result[cut], results[owner][cut])

    def _cut(self, chunk: slice | None) -> tuple[Array, Sequence[slice]]:
        piece = self._array[chunk] if chunk is not None else self._array[:0]
        return piece, slices(piece.size, self._how.owners, piece.itemsize) if piece.size else ()

    def end(self) -> None:
        """The areas of the last step are not written again before the next operation's second barrier."""


#: Bytes of one message of a chunk: large enough that Python's part is small, small enough that the last one, which
#: nothing overlaps, is short.
_PIECE = 256 * 1024
_SMALLEST_PIECE = 64 * 1024
#: Small messages go in one round, in which the first member of each host sends everything to those of all others, as
#: long as that is no more than this. With two hosts it is no more than otherwise.
_IN_ONE_ROUND = 256 * 1024
#: A message is cut into about as many chunks, as far as the limits above allow.
_CHUNKS = 4


class HierarchicalAllReduce:
    """The members of one communicator that spans hosts, seen from one of them.

    Args:
        node: the members of this host, None where this is the only one.
        lane: the members of equal position on all hosts, None where this host has more members than another.
        position: on this host.
        owners: members a host that have a lane.
        hosts: how many.
        size: of the communicator.
    """

    def __init__(
        self,
        node: SharedMemoryGroup | None,
        lane: NetworkGroup | None,
        position: int,
        owners: int,
        hosts: int,
        size: int,
    ) -> None:
        self._node, self._lane = node, lane
        self._position, self._owners, self._hosts, self._size = position, owners, hosts, size

    def all_reduce(
        self,
        array: Array,
        op: Op,
        dtype: str,
        fingerprint: Fingerprint,
        codec: Codec | None = None,
        source: Array | None = None,
    ) -> None:
        """Reduce `array` of all members; all get the same bits.

        Args:
            array: 1-d storage array, the same length everywhere.
            op, dtype: as in `reduce_into`.
            signature: of the operation.
            wire: how numbers travel between hosts, as they are by default.
            source: what this member adds; `array` itself by default.
        """
        before, after = _shares(self._size, dtype, codec is not None) if op is Op.AVERAGE else (1.0, 1.0)
        if array.nbytes <= max(SMALL, _IN_ONE_ROUND // (self._hosts - 1)):
            self._small(array, Sum(op, dtype, before, 1, fingerprint), after, codec, source)
            return
        how = Sum(op, dtype, before, self._owners, fingerprint)
        length = self.chunk_bytes(array.nbytes) // array.itemsize
        chunks = [slice(start, min(start + length, array.size)) for start in range(0, array.size, length)]
        # Who waits for its mates keeps sending: they may wait for a host that waits for just that.
        mates = intra_node_stage(
            self._node, array, how, source, self._lane.progress if self._lane is not None else None
        )
        chosen, rounds = choose_algorithm(self._hosts, array.nbytes)
        stream = None
        if self._lane is not None:
            reduction = Reduction(self._lane, op, dtype, after, codec or IdentityCodec(), fingerprint)
            reduction.announce(array.nbytes)
            stream = Pipeline(reduction, chosen)
        delay = rounds + 1
        for step in range(len(chunks) + delay):
            new = chunks[step] if step < len(chunks) else None
            mates.step(new, chunks[step - delay] if step >= delay else None)
            if stream is not None:
                stream.step(self._own(array[new]) if new is not None else None)
        if stream is not None:
            stream.end()
        mates.end()

    def _small(self, array: Array, how: Sum, divisor: float, codec: Codec | None, source: Array | None) -> None:
        """One round, by the first member of each host."""
        mates, whole = intra_node_stage(self._node, array, how, source), slice(0, array.size)
        mates.step(whole, None)
        if self._position == 0:
            assert self._lane is not None
            self._lane.all_reduce_small(array, how.op, how.dtype, divisor, how.fingerprint, codec)
        mates.step(None, whole)
        mates.end()

    def _own(self, chunk: Array) -> Array:
        return chunk[slices(chunk.size, self._owners, chunk.itemsize)[self._position]]

    def chunk_bytes(self, nbytes: int) -> int:
        """Bytes of a chunk, the same on all ranks; a multiple of what the ranks' shares are aligned to."""
        shares = self._owners * self._hosts
        wanted = min(max(nbytes // _CHUNKS, shares * _SMALLEST_PIECE), shares * _PIECE, ROOM)
        return max(wanted // (64 * shares), 1) * 64 * shares


def _shares(size: int, dtype: str, is_rounded: bool) -> tuple[float, float]:
    """What to divide an average by before numbers leave a host, and after they are added up.

    A float16 ends at 65,504, so the sum over a host may overflow where the average does not: it is scaled down first,
    by a power of two, which rounds nothing.
    """
    if is_rounded:  # to 16 bits, for the wire
        return float(size), 1.0
    if dtype != "float16":
        return 1.0, float(size)
    before = 1 << (size - 1).bit_length()
    return float(before), size / before
