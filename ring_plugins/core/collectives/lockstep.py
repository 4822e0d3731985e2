"""The part of an all-reduce between hosts that happens inside each host, chunk by chunk.

Members of a host take one step together for every chunk: the next chunk's numbers are added up over the host, each
slice by the member that owns it and sends it to other hosts, and an earlier chunk's results are handed to everyone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ring_plugins.core.arithmetic import reduce_into
from ring_plugins.core.collectives.node import ROOM, Node, slices
from ring_plugins.core.collectives.signature import Signature
from ring_plugins.core.operations import Op

Array = np.ndarray[Any, np.dtype[Any]]


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
    signature: Signature


class Lockstep(Protocol):
    """What the members of a host do together."""

    def step(self, new: slice | None, old: slice | None) -> None:
        """Leave the host's sum of the own slice of chunk `new` in the array, and everyone's results of chunk `old`."""

    def end(self) -> None:
        """After the last step: return when no other member touches this one's memory any more."""


def lockstep(
    node: Node | None,
    array: Array,
    how: Sum,
    source: Array | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Lockstep:
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

    def __init__(self, node: Node, parts: Sequence[Array], how: Sum) -> None:
        self._node, self._parts, self._how = node, parts, how
        node.arrive(how.signature)

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

    def __init__(self, node: Node, array: Array, source: Array, how: Sum, meanwhile: Callable[[], None] | None) -> None:
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
            node.arrive(self._how.signature, self._meanwhile)
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
