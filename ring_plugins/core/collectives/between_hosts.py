"""All-reduce on several hosts: added up inside each host, between the hosts, and handed round inside each host.

The three happen at the same time, for different chunks of the data. Members of equal position on their hosts form a
lane and own one slice of every chunk, so a host's ranks share its network.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ring_plugins.core.collectives.lane import SMALL, Lane
from ring_plugins.core.collectives.lockstep import Sum, lockstep
from ring_plugins.core.collectives.node import ROOM, Node, slices
from ring_plugins.core.collectives.reduction import Reduction
from ring_plugins.core.collectives.signature import Signature
from ring_plugins.core.collectives.stream import Stream, way
from ring_plugins.core.collectives.wire import AsIs, Wire
from ring_plugins.core.operations import Op

Array = np.ndarray[Any, np.dtype[Any]]

#: Bytes of one message of a chunk: large enough that Python's part is small, small enough that the last one, which
#: nothing overlaps, is short.
_PIECE = 256 * 1024
_SMALLEST_PIECE = 64 * 1024
#: Small messages go in one round, in which the first member of each host sends everything to those of all others, as
#: long as that is no more than this. With two hosts it is no more than otherwise.
_IN_ONE_ROUND = 256 * 1024
#: A message is cut into about as many chunks, as far as the limits above allow.
_CHUNKS = 4


class BetweenHosts:
    """The members of one communicator that spans hosts, seen from one of them.

    Args:
        node: the members of this host, None where this is the only one.
        lane: the members of equal position on all hosts, None where this host has more members than another.
        position: on this host.
        owners: members a host that have a lane.
        hosts: how many.
        size: of the communicator.
    """

    def __init__(self, node: Node | None, lane: Lane | None, position: int, owners: int, hosts: int, size: int) -> None:
        self._node, self._lane = node, lane
        self._position, self._owners, self._hosts, self._size = position, owners, hosts, size

    def all_reduce(
        self,
        array: Array,
        op: Op,
        dtype: str,
        signature: Signature,
        wire: Wire | None = None,
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
        before, after = _shares(self._size, dtype, wire is not None) if op is Op.AVERAGE else (1.0, 1.0)
        if array.nbytes <= max(SMALL, _IN_ONE_ROUND // (self._hosts - 1)):
            self._small(array, Sum(op, dtype, before, 1, signature), after, wire, source)
            return
        how = Sum(op, dtype, before, self._owners, signature)
        length = self.chunk_bytes(array.nbytes) // array.itemsize
        chunks = [slice(start, min(start + length, array.size)) for start in range(0, array.size, length)]
        # Who waits for its mates keeps sending: they may wait for a host that waits for just that.
        mates = lockstep(self._node, array, how, source, self._lane.progress if self._lane is not None else None)
        chosen, rounds = way(self._hosts, array.nbytes)
        stream = None
        if self._lane is not None:
            reduction = Reduction(self._lane, op, dtype, after, wire or AsIs(), signature)
            reduction.announce(array.nbytes)
            stream = Stream(reduction, chosen)
        delay = rounds + 1
        for step in range(len(chunks) + delay):
            new = chunks[step] if step < len(chunks) else None
            mates.step(new, chunks[step - delay] if step >= delay else None)
            if stream is not None:
                stream.step(self._own(array[new]) if new is not None else None)
        if stream is not None:
            stream.end()
        mates.end()

    def _small(self, array: Array, how: Sum, divisor: float, wire: Wire | None, source: Array | None) -> None:
        """One round, by the first member of each host."""
        mates, whole = lockstep(self._node, array, how, source), slice(0, array.size)
        mates.step(whole, None)
        if self._position == 0:
            assert self._lane is not None
            self._lane.all_reduce_small(array, how.op, how.dtype, divisor, how.signature, wire)
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
