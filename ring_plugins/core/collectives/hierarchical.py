"""All-reduce on several hosts: reduced inside each host, then between hosts, then shared inside each host.

**Idea.** NCCL and Horovod call it hierarchical: the slow network moves each host's sum once, instead of every rank's
numbers. As in rail-optimized networks, the work between hosts is shared: ranks of equal local rank on all hosts form a
*rail*, a `NetworkGroup` of their own. Rail i owns slice i of every chunk, so as many processes of a host send at
once as there are rails, which is the number of ranks on the smallest host.

**Pipeline.** The three stages run at the same time, on different chunks. In each step the ranks of a host

1. reduce-scatter a new chunk inside the host: each rail's rank combines its slice of all ranks' numbers,
2. pass that slice to the rail's pipeline (`algorithms`), which advances all its chunks by a round,
3. all-gather a chunk whose rounds are over: everyone copies the results of all rails.

Steps 1 and 3 are the *intra-node stage*, and share one barrier. There is one class of stage for each kind of memory: a
single rank's, memory that all ranks of the host map, and ordinary memory. All ranks of a host choose the same class,
because they allocate together and call with equal sizes.

**Progress.** While a rank waits for the other ranks of its host, it keeps its rail's transfers moving. Those ranks may
be waiting for a remote host that itself waits for data that this rank still has to send; where the kernel buffers
little, two hosts could block each other forever.

**Small messages**: the first ranks of all hosts exchange their hosts' sums, in one round up to seven hosts.

**Averages.** The sum is divided once, at the end, with two exceptions. The largest float16 is 65,504, so a host's sum
may overflow where the average does not: the sum is first scaled down by a power of two, which costs no precision, and
divided by the rest at the end. Numbers that are rounded to 16 bits for the network are divided before that, for the
same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_into
from ring_plugins.core.arrays.codec import Codec, IdentityCodec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import CACHE_LINE, slices
from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.algorithms import Pipeline, Reduction, choose_algorithm
from ring_plugins.core.collectives.butterfly import radices
from ring_plugins.core.collectives.fingerprint import Fingerprint
from ring_plugins.core.collectives.net_group import SMALL_BYTES, NetworkGroup
from ring_plugins.core.collectives.shm_group import CHUNK_STAGING_BYTES, SharedMemoryGroup

#: Bytes of one message of a chunk: large enough that Python's overhead is small, small enough that the last message,
#: which nothing overlaps, is short.
_MESSAGE_BYTES = 256 * 1024
_SMALLEST_MESSAGE_BYTES = 64 * 1024
#: An array is cut into about this many chunks, within the limits above.
_CHUNKS = 4
#: A message is small if a host that receives the whole sums of others then receives no more than this. With two hosts,
#: cutting it into parts would not make a host receive less.
_SMALL_RECEIVED_BYTES = 256 * 1024


class HierarchicalAllReduce:
    """One member's side of the all-reduces of a communicator that spans hosts; implements `Reducer`.

    Args:
        node: the members of this host, None where this is the only one.
        rail: the members of equal local rank on all hosts, None where some host has no such member.
        local_rank: position on this host.
        rails: number of rails.
        num_nodes: number of hosts.
        size: of the communicator.
    """

    def __init__(
        self,
        node: SharedMemoryGroup | None,
        rail: NetworkGroup | None,
        local_rank: int,
        rails: int,
        num_nodes: int,
        size: int,
    ) -> None:
        self._node, self._rail = node, rail
        self._local_rank, self._rails, self._num_nodes, self._size = local_rank, rails, num_nodes, size
        messages = sum(radix - 1 for radix in radices(num_nodes))
        self.largest_small = max(SMALL_BYTES, _SMALL_RECEIVED_BYTES // messages)

    def all_reduce(
        self, array: Array, source: Array, op: Op, dtype: str, codec: Codec | None, fingerprint: Fingerprint
    ) -> None:
        """As in `Reducer`."""
        codec = codec or IdentityCodec()
        before, after = average_divisors(self._size, dtype, not codec.exact) if op is Op.AVERAGE else (1.0, 1.0)
        try:
            if array.nbytes <= self.largest_small:
                self._reduce_small(array, source, LocalReduction(op, dtype, before, 1, fingerprint), after, codec)
            else:
                local = LocalReduction(op, dtype, before, self._rails, fingerprint)
                self._reduce_chunks(array, source, local, after, codec)
        except MismatchError as error:
            report_mismatch(error, self._node, self._rail, self._local_rank)
            raise

    def _reduce_small(self, array: Array, source: Array, local: LocalReduction, divisor: float, codec: Codec) -> None:
        whole = slice(0, array.size)
        stage = intra_node_stage(self._node, array, source, local)
        stage.step(whole, None)
        if self._local_rank == 0:
            assert self._rail is not None
            self._rail.all_reduce_small(array, local.op, local.dtype, divisor, codec, local.fingerprint)
        stage.step(None, whole)
        stage.finish()

    def _reduce_chunks(self, array: Array, source: Array, local: LocalReduction, divisor: float, codec: Codec) -> None:
        rail, op, dtype, fingerprint = self._rail, local.op, local.dtype, local.fingerprint
        length = self.chunk_bytes(array.nbytes) // array.itemsize
        chunks = [slice(start, min(start + length, array.size)) for start in range(0, array.size, length)]
        stage = intra_node_stage(self._node, array, source, local, rail.progress if rail is not None else None)
        algorithm, rounds = choose_algorithm(self._num_nodes, array.nbytes)
        pipeline = None
        delay = rounds + 1
        for step in range(len(chunks) + delay):
            new = chunks[step] if step < len(chunks) else None
            stage.step(new, chunks[step - delay] if step >= delay else None)
            if step == 0 and rail is not None:  # not before this host's ranks agree: others take it for the host's word
                pipeline = Pipeline(Reduction(rail, op, dtype, divisor, codec, array.nbytes, fingerprint), algorithm)
            if pipeline is not None:
                pipeline.step(self._rail_slice(array[new]) if new is not None else None)
        if pipeline is not None:
            pipeline.finish()
        stage.finish()

    def _rail_slice(self, chunk: Array) -> Array:
        return chunk[slices(chunk.size, self._rails, chunk.itemsize)[self._local_rank]]

    def chunk_bytes(self, nbytes: int) -> int:
        """Bytes of a chunk, the same on all ranks; a multiple of the cache lines that its parts are aligned to."""
        parts = self._rails * self._num_nodes
        wanted = min(
            max(nbytes // _CHUNKS, parts * _SMALLEST_MESSAGE_BYTES), parts * _MESSAGE_BYTES, CHUNK_STAGING_BYTES
        )
        return max(wanted // (CACHE_LINE * parts), 1) * CACHE_LINE * parts


def report_mismatch(
    error: MismatchError, node: SharedMemoryGroup | None, rail: NetworkGroup | None, local_rank: int
) -> None:
    """Tell the ranks that wait for this one, on its host and on others, of a mismatch that it found.

    Between hosts the first rail is enough: its members take part in every operation, and tell their hosts.
    """
    if node is not None:
        node.barriers.report_mismatch(error)
    if rail is not None and local_rank == 0:
        rail.report_mismatch(error)


def average_divisors(size: int, dtype: str, is_rounded: bool) -> tuple[float, float]:
    """The divisors of an average: inside a host, and after the sum between hosts.

    Numbers that travel in 16 bits are divided twice. Dividing by a power of two before they leave the host keeps a sum
    of float16 from overflowing where the average does not, and rounds nothing: where all ranks give 1, as the flags of
    gradients do, the average is exactly 1. Dividing by `size` at once would send 1/3, which has no exact form.
    """
    if not is_rounded and dtype != "float16":
        return 1.0, float(size)
    before = 1 << (size - 1).bit_length()
    return float(before), size / before


class LocalReduction(NamedTuple):
    """The reduction that the ranks of a host compute together.

    Attributes:
        op, dtype, divisor: as in `reduce_into`.
        rails: number of rails; that many ranks of a host, the first ones, own a slice of each chunk.
        fingerprint: of the operation.
    """

    op: Op
    dtype: str
    divisor: float
    rails: int
    fingerprint: Fingerprint


class IntraNodeStage(Protocol):
    """The part of a hierarchical all-reduce that happens inside a host."""

    def step(self, new: slice | None, old: slice | None) -> None:
        """Reduce-scatter chunk `new` among the ranks of the host, and all-gather the results of chunk `old`.

        Afterwards this rail's slice of `new` holds the host's sum, and `old` holds the results of all rails.
        """

    def finish(self) -> None:
        """Return when no other rank touches this rank's memory any more; called after the last step."""


def intra_node_stage(
    node: SharedMemoryGroup | None,
    array: Array,
    source: Array,
    local: LocalReduction,
    meanwhile: Callable[[], None] | None = None,
) -> IntraNodeStage:
    """Choose the stage that fits the memory.

    Args:
        node: the ranks of this host, None where this is the only one.
        array: 1-d storage array, for the result.
        source: this rank's numbers; may be `array` itself.
        local: the reduction.
        meanwhile: called repeatedly while this rank waits for others of its host.
    """
    if node is None:
        return _OneRank(array, source, local)
    mapped = node.mapped(array)
    if mapped is None:
        return _StagedMemory(node, array, source, local, meanwhile)
    if source is not array:
        np.copyto(array, source)
    return _MappedMemory(node, mapped, local)


class _OneRank:
    """The only rank of its host: nothing to exchange. It copies each chunk just before it is sent."""

    def __init__(self, array: Array, source: Array, local: LocalReduction) -> None:
        self._array, self._source, self._local = array, source, local

    def step(self, new: slice | None, old: slice | None) -> None:
        if new is None:
            return
        piece = self._array[new]
        if self._source is not self._array:
            np.copyto(piece, self._source[new])
        if self._local.divisor != 1:
            reduce_into(piece, [piece], self._local.op, self._local.dtype, self._local.divisor)

    def finish(self) -> None:
        pass


class _MappedMemory:
    """Memory that all ranks map: each rail's rank reads and writes everyone's, without a barrier between the chunks."""

    def __init__(self, node: SharedMemoryGroup, parts: Sequence[Array], local: LocalReduction) -> None:
        self._node, self._parts, self._local = node, parts, local
        node.barriers.arrive(local.fingerprint)

    def _rail_slices(self, chunk: slice) -> list[Array]:
        """This rail's slice of a chunk in the memory of every rank, this rank's first."""
        position = self._node.position
        pieces = [part[chunk] for part in self._parts]
        cut = slices(pieces[0].size, self._local.rails, pieces[0].itemsize)[position]
        return [pieces[position][cut], *(piece[cut] for i, piece in enumerate(pieces) if i != position)]

    def step(self, new: slice | None, old: slice | None) -> None:
        if self._node.position >= self._local.rails:
            return
        if new is not None:
            pieces = self._rail_slices(new)
            reduce_into(pieces[0], pieces, self._local.op, self._local.dtype, self._local.divisor)
        if old is not None:
            result, *others = self._rail_slices(old)
            for other in others:
                np.copyto(other, result)

    def finish(self) -> None:
        self._node.barriers.synchronize()


class _StagedMemory:
    """Ordinary memory: numbers and results go through staging buffers, with one barrier per step.

    Two buffers for numbers alternate, and two for results. A buffer is written again two steps later, and the barrier
    of the step in between comes after everyone's reads.
    """

    def __init__(
        self,
        node: SharedMemoryGroup,
        array: Array,
        source: Array,
        local: LocalReduction,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        self._node, self._array, self._source, self._local = node, array, source, local
        self._meanwhile = meanwhile
        count = CHUNK_STAGING_BYTES // array.itemsize
        staging = [whole.view(array.dtype) for whole in node.chunk_staging]
        first, second, third, fourth = [[whole[i * count : (i + 1) * count] for whole in staging] for i in range(4)]
        self._inputs, self._results = (first, second), (third, fourth)
        self._turn = 0
        self._arrived = False

    def step(self, new: slice | None, old: slice | None) -> None:
        if new is None and old is None:  # on all ranks of the host
            return
        node, local, position = self._node, self._local, self._node.position
        self._turn ^= 1
        inputs, results = self._inputs[self._turn], self._results[self._turn]
        chunk, chunk_cuts = self._cut(new)
        mine = self._source[new] if new is not None else chunk
        result, result_cuts = self._cut(old)
        for i, cut in enumerate(chunk_cuts):
            if i != position:
                np.copyto(inputs[position][cut], mine[cut])
        if position < len(result_cuts):
            cut = result_cuts[position]
            np.copyto(results[position][cut], result[cut])
        if self._arrived:
            node.barriers.synchronize(meanwhile=self._meanwhile)
        else:
            node.barriers.arrive(local.fingerprint, self._meanwhile)
            self._arrived = True
        if position < len(chunk_cuts):
            cut = chunk_cuts[position]
            others = [staged[cut] for i, staged in enumerate(inputs) if i != position]
            reduce_into(chunk[cut], [mine[cut], *others], local.op, local.dtype, local.divisor)
        for i, cut in enumerate(result_cuts):
            if i != position:
                np.copyto(result[cut], results[i][cut])

    def _cut(self, chunk: slice | None) -> tuple[Array, Sequence[slice]]:
        """A chunk of the array, and the rails' slices of it."""
        piece = self._array[chunk] if chunk is not None else self._array[:0]
        return piece, slices(piece.size, self._local.rails, piece.itemsize) if piece.size else ()

    def finish(self) -> None:
        """Do nothing: the last step reads only results, and the next operation writes those after a barrier."""
