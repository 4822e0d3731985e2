"""Collectives among the ranks of one host, over shared memory.

Each member owns one segment, which all others map:

    control page | staging buffer 0 | staging buffer 1 | staging of chunks between hosts (see `hierarchical`)

**Staging.** A member copies the data that others need into its staging buffer, all pass a barrier, and the others read
it there. The two staging buffers alternate from barrier to barrier. A buffer is written again at the earliest two
barriers later, and the barrier in between comes after everyone's reads. So one barrier per use is enough: no second one
has to protect the buffer from being overwritten.

**All-reduce.** There are three algorithms, chosen by size and by where the memory lies:

- Up to `SMALL_BYTES`, less with many members, every member stages its numbers and reads everyone's: one barrier.
- Memory from `allocate` is mapped by all members. Each member reduces its slice of everyone's memory and writes the
  result to all of them, a reduce-scatter and all-gather without copies: two barriers.
- Any other memory is staged in rounds. Each member reduces its slices of a round directly from the staging buffers and
  leaves the results there. The barrier of a round announces both that the round is staged and that the results of the
  round before are ready.

Several arrays share these barriers: all that are mapped are reduced after the first, and a round holds as many of the
others, or parts of them, as a staging buffer can. Every element is combined in rank order, so results depend neither on
the algorithm nor on which arrays were reduced together.

The file is longer than others, and its class has a method more, since all of this shares two staging buffers and their
barriers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_everywhere, reduce_into
from ring_plugins.core.arrays.codec import Codec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import CACHE_LINE, slices
from ring_plugins.core.base.errors import SharedMemoryError
from ring_plugins.core.base.types import Array, Bytes
from ring_plugins.core.collectives.api import ByteCollectives
from ring_plugins.core.collectives.fingerprint import Fingerprint, size_mismatch
from ring_plugins.core.collectives.shm_barrier import PAGE, SharedMemoryBarrier
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.linux.shared_memory import Address, Segment, SharedBuffer, address_of

#: Bytes that a collective other than all-reduce stages between two barriers.
STAGING_BYTES = 1024 * 1024
#: Bytes of one of the two staging buffers, which an all-reduce stages between two barriers. On two ranks, 16 MiB took
#: 2.41, 2.01, 2.02, 1.92 and 2.40 ms with rounds of 0.25, 0.5, 1, 2 and 4 MiB, and 64 MiB 9.74, 8.63, 8.08, 8.22, 8.26.
ROUND_BYTES = 2 * STAGING_BYTES
#: An array is not cut for less than this.
_SMALLEST_CHUNK_BYTES = 64 * 1024
#: Up to this size each of two members reads everything: one barrier instead of two. 64 KiB of ordinary memory took 11.4
#: µs instead of 16.0, 128 KiB in a bucket 18 instead of 15. More members read more, see `_small_bytes`.
SMALL_BYTES = 64 * 1024
#: How many arrays in shared buffers are remembered with everyone's part of them; a step reduces the same ones again.
_MAPPED = 256
#: Bytes of each of the four buffers through which chunks go to and from other hosts. Pages that are never written take
#: no memory.
CHUNK_STAGING_BYTES = 4 * 1024 * 1024


def create_segment() -> Segment:
    """Create the segment that a member passes to `SharedMemoryGroup`."""
    return Segment.create(PAGE + 2 * ROUND_BYTES + 4 * CHUNK_STAGING_BYTES)


#: A part of an array: the array, its source and dtype, first and last element, and where it lies in a staging buffer.
_Part = tuple[Array, Array, str, int, int, int]


class _Chunk(NamedTuple):
    """A part of an array in a round.

    Attributes:
        target: takes the result.
        source: this member's numbers.
        dtype: element type.
        staged: everyone's copies of it in the staging buffers.
        cuts: the slice that each member reduces.
    """

    target: Array
    source: Array
    dtype: str
    staged: list[Array]
    cuts: tuple[slice, ...]


class SharedMemoryGroup(ByteCollectives):
    """The members of a communicator that live on this host; implements `ByteCollectives` and `Reducer`.

    Args:
        own: this member's segment from `create_segment`.
        addresses: all members' segments in rank order.
        ranks: their world ranks.
        position: which of them this process is.
        wait: long waits go through it.
        name: of the communicator.
        replaces: whether members may join later, for which the files of shared buffers stay open.

    Attributes:
        size, position: of the group, and of this process in it.
        barriers: the barrier that all operations share.
        chunk_staging: every member's four buffers for chunks between hosts, as one array of bytes per member.
    """

    def __init__(
        self,
        own: Segment,
        addresses: Sequence[Address],
        ranks: Sequence[int],
        position: int,
        wait: Wait,
        name: str,
        replaces: bool = False,
    ) -> None:
        self.position, self.size = position, len(ranks)
        self._small_bytes = _small_bytes(self.size)
        self._ranks, self._name, self._wait = tuple(ranks), name, wait
        segments = self._open(own, addresses)
        self._use(segments)
        self._buffers: list[SharedBuffer] = []
        #: What `mapped` has found, by `id` of the array, which is kept so that no other has its `id`.
        self._mapped: dict[int, tuple[Array, list[Array]]] = {}
        self._replaces = replaces
        self._close_files(segments)

    def _use(self, segments: Sequence[Segment]) -> None:
        """Take all members' segments into use, in which there is nothing but zeros."""
        arrays = [segment.array for segment in segments]
        pages = [array[:PAGE] for array in arrays]
        self.barriers = SharedMemoryBarrier(pages, self._ranks, self.position, self._wait, self._name)
        self._arrive, self._synchronize = self.barriers.arrive, self.barriers.synchronize
        first, second = PAGE + ROUND_BYTES, PAGE + 2 * ROUND_BYTES
        #: By staging buffer, then by member.
        self._staging = [array[PAGE:first] for array in arrays], [array[first:second] for array in arrays]
        self._small_kind: tuple[np.dtype[Any], int] | None = None
        self._small_staging: tuple[list[Array], ...] = ()
        self.chunk_staging = [array[second:] for array in arrays]

    def _open(self, own: Segment, addresses: Sequence[Address]) -> list[Segment]:
        """Map all members' segments, in rank order."""
        segments = []
        for i, (address, rank) in enumerate(zip(addresses, self._ranks, strict=True)):
            try:
                segments.append(own if i == self.position else Segment.open(address, rank))
            except SharedMemoryError:  # perhaps since that rank has given up, and its segment is gone
                self._wait.raise_reason(rank, lambda: f"the allocation of memory that ranks share in {self._name}")
                raise
        return segments

    def _close_files(self, segments: Sequence[Segment]) -> None:
        """Close the files once all members have mapped them."""
        self._synchronize()
        for segment in segments:
            segment.close_file()

    def keep(self, ranks: Sequence[int], epoch: int) -> None:
        """Go on with these members, of which none is in an operation; the others are gone.

        Memory that they map stays where it is, so views of it stay valid.

        Args:
            ranks: world ranks.
            epoch: from which barriers count on; see `SharedMemoryBarrier.keep`.
        """
        places = [self._ranks.index(rank) for rank in ranks]
        own = self._ranks[self.position]
        self.barriers.keep(places, epoch)
        first, second = self._staging
        self._staging = [first[place] for place in places], [second[place] for place in places]
        self._small_kind = None
        self.chunk_staging = [self.chunk_staging[place] for place in places]
        for buffer in self._buffers:
            buffer.keep(places)
        self._mapped.clear()
        self._ranks = tuple(ranks)
        self.position, self.size = self._ranks.index(own), len(ranks)
        self._small_bytes = _small_bytes(self.size)

    @property
    def own_buffers(self) -> list[Address]:
        """Where other processes find this member's part of each shared buffer, if members may join."""
        return [buffer.own.address for buffer in self._buffers if buffer.own is not None]

    def renew(
        self, ranks: Sequence[int], position: int, segments: Sequence[Segment], parts: Sequence[Sequence[Segment]]
    ) -> None:
        """Go on with other members, and fresh memory. All do so at the same place, and nothing of it fails.

        Args:
            ranks, position: as in the constructor.
            segments: of all members, zeros.
            parts: of each shared buffer, all members' parts. This member's own stays where it is.
        """
        self._ranks, self.position, self.size = tuple(ranks), position, len(ranks)
        self._small_bytes = _small_bytes(self.size)
        self._use(segments)
        self._mapped.clear()
        for buffer, of_buffer in zip(self._buffers, parts, strict=True):
            buffer.replace([segment.array for segment in of_buffer], position)
            for place, segment in enumerate(of_buffer):
                if place != position:
                    segment.hide_from_children()

    def drop_buffers(self) -> None:
        """Forget all buffers."""
        self._buffers.clear()
        self._mapped.clear()

    # Moving bytes ---------------------------------------------------------------------------------

    def _next_staging(self) -> list[Bytes]:
        """Everyone's staging buffers for the next use."""
        return self._staging[self.barriers.parity]

    def barrier(self, fingerprint: Fingerprint) -> None:
        self._arrive(fingerprint)

    def broadcast(self, data: Bytes, root: int, fingerprint: Fingerprint) -> None:
        for start in range(0, max(data.size, 1), STAGING_BYTES):
            piece = data[start : start + STAGING_BYTES]
            staged = self._next_staging()[root][: piece.size]
            if self.position == root:
                staged[:] = piece
            self._arrive(fingerprint) if start == 0 else self._synchronize()
            if self.position != root:
                piece[:] = staged

    def all_gather(self, mine: Bytes, parts: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        is_in_place = mine.size > SMALL_BYTES and address_of(mine) == address_of(parts[self.position])
        for start in range(0, max(1, *(part.size for part in parts)), STAGING_BYTES):
            staging = self._next_staging()
            piece = mine[start : start + STAGING_BYTES]
            staging[self.position][: piece.size] = piece
            self._arrive(fingerprint) if start == 0 else self._synchronize()
            for i, (part, staged) in enumerate(zip(parts, staging, strict=True)):
                if i == self.position and is_in_place:
                    continue
                piece = part[start : start + STAGING_BYTES]
                piece[:] = staged[: piece.size]

    def all_to_all(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        self.exchange(outgoing, incoming, self._largest_part(outgoing, incoming, fingerprint))

    def exchange(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes], largest: int) -> None:
        """Send `outgoing[i]` to member i and fill `incoming[i]` from it, where all know that the sizes fit.

        Args:
            outgoing, incoming: one array per member, in rank order.
            largest: bytes of the largest part of any member, equal on all members.
        """
        share = STAGING_BYTES // self.size // CACHE_LINE * CACHE_LINE  # of a staging buffer, for one receiver
        for start in range(0, largest, share):
            staging = self._next_staging()
            for i, part in enumerate(outgoing):
                piece = part[start : start + share]
                staging[self.position][i * share : i * share + piece.size] = piece
            self._synchronize()
            own_share = self.position * share
            for part, staged in zip(incoming, staging, strict=True):
                piece = part[start : start + share]
                piece[:] = staged[own_share : own_share + piece.size]

    def _largest_part(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes], fingerprint: Fingerprint) -> int:
        """The bytes of the largest part that any member sends.

        Raises:
            MismatchError: on all members, if one sends another number of bytes than its peer expects; the rest of the
                peer's memory would be filled with another operation's data.
        """
        own = np.array([[part.size for part in parts] for parts in (outgoing, incoming)], np.int64)
        sizes = np.empty((self.size, *own.shape), np.int64)
        self.all_gather(own.view(np.uint8).reshape(-1), [row.view(np.uint8).reshape(-1) for row in sizes], fingerprint)
        sent, expected = sizes[:, 0], sizes[:, 1].T
        if not np.array_equal(sent, expected):
            sender, receiver = np.argwhere(sent != expected)[0].tolist()
            ranks, bytes_sent, bytes_expected = self._ranks, sent[sender, receiver], expected[sender, receiver]
            raise size_mismatch(self._name, fingerprint, ranks[sender], bytes_sent, ranks[receiver], bytes_expected)
        return int(sent.max())

    # Memory that all members map ------------------------------------------------------------------

    def allocate(self, nbytes: int, fingerprint: Fingerprint) -> SharedBuffer:
        """Allocate memory that all members map, and in which `all_reduce` works in place."""
        own = Segment.create(nbytes)
        address = np.array(own.address, np.int64)
        rows = np.empty((self.size, address.size), np.int64)
        self.all_gather(address.view(np.uint8), [row.view(np.uint8) for row in rows], fingerprint)
        segments = self._open(own, [(int(pid), int(fd), int(size)) for pid, fd, size in rows])
        self._close_files([segment for segment in segments if segment is not own or not self._replaces])
        for i, segment in enumerate(segments):
            segment.own_copy_in_children() if i == self.position else segment.hide_from_children()
        buffer = SharedBuffer([segment.array for segment in segments], self.position, own if self._replaces else None)
        self._buffers.append(buffer)
        return buffer

    def release(self, buffer: SharedBuffer) -> None:
        """Forget a buffer; its memory is freed with the last view of it."""
        self._buffers.remove(buffer)
        self._mapped.clear()

    def mapped(self, array: Array) -> list[Array] | None:
        """The memory of all members that corresponds to `array`, if it lies in a buffer from `allocate`."""
        if (known := self._mapped.get(id(array))) is not None:
            return known[1]
        for buffer in self._buffers:
            offset = buffer.offset_of(array)
            if offset is not None:
                found = [part[offset : offset + array.nbytes].view(array.dtype) for part in buffer.parts]
                if len(self._mapped) >= _MAPPED:
                    self._mapped.clear()
                self._mapped[id(array)] = array, found
                return found
        return None

    # All-reduce -----------------------------------------------------------------------------------

    def all_reduce(
        self, array: Array, source: Array, op: Op, dtype: str, codec: Codec | None, fingerprint: Fingerprint
    ) -> None:
        """As in `Reducer`; the codec is ignored, since nothing is sent to another host."""
        divisor = self.size if op is Op.AVERAGE else 1
        if self.size == 1:  # the others are gone
            self._arrive(fingerprint)
            if source is not array:
                np.copyto(array, source)
            return
        if array.nbytes <= self._small_bytes:
            kind = array.dtype, array.size
            if kind != self._small_kind:
                self._take_small_staging(*kind)
            staged = self._small_staging[self.barriers.parity]
            staged[self.position][...] = source
            self._arrive(fingerprint)
            reduce_into(array, staged, op, dtype, divisor)
            return
        self._reduce_large([array], [source], op, [dtype], divisor, fingerprint)

    def all_reduce_coalesced(
        self,
        arrays: Sequence[Array],
        sources: Sequence[Array],
        op: Op,
        dtypes: Sequence[str],
        fingerprint: Fingerprint,
    ) -> None:
        """As `all_reduce` of one array after the other, with fewer barriers."""
        divisor = self.size if op is Op.AVERAGE else 1
        if self.size == 1:  # the others are gone
            self._arrive(fingerprint)
            for array, source in zip(arrays, sources, strict=True):
                if source is not array:
                    np.copyto(array, source)
            return
        if sum(-(-array.nbytes // CACHE_LINE) * CACHE_LINE for array in arrays) > self._small_bytes:
            self._reduce_large(arrays, sources, op, dtypes, divisor, fingerprint)
            return
        staged = self._stage_small(arrays, sources)
        self._arrive(fingerprint)
        for array, terms, dtype in zip(arrays, staged, dtypes, strict=True):
            reduce_into(array, terms, op, dtype, divisor)

    def _stage_small(self, arrays: Sequence[Array], sources: Sequence[Array]) -> list[list[Array]]:
        """Stage arrays that fit there together; returns everyone's copies of each."""
        staging, end, staged = self._next_staging(), 0, []
        for array, source in zip(arrays, sources, strict=True):
            start, end = end, end + array.nbytes
            copies = [whole[start:end].view(array.dtype) for whole in staging]
            np.copyto(copies[self.position], source)
            staged.append(copies)
            end += -end % CACHE_LINE
        return staged

    def _take_small_staging(self, storage: np.dtype[Any], size: int) -> None:
        """Make views of everyone's staging buffers, and keep them for the next operation, often as small."""
        self._small_staging = tuple(
            [whole[: size * storage.itemsize].view(storage) for whole in buffers] for buffers in self._staging
        )
        self._small_kind = storage, size

    def _reduce_large(
        self,
        arrays: Sequence[Array],
        sources: Sequence[Array],
        op: Op,
        dtypes: Sequence[str],
        divisor: int,
        fingerprint: Fingerprint,
    ) -> None:
        """Reduce mapped arrays where they are and others through the staging buffers; at least two barriers."""
        mapped: list[tuple[list[Array], str]] = []
        staged: list[tuple[Array, Array, str]] = []
        for array, source, dtype in zip(arrays, sources, dtypes, strict=True):
            parts = self.mapped(array)
            if parts is None:
                staged.append((array, source, dtype))
                continue
            if source is not array:
                np.copyto(array, source)
            mapped.append((parts, dtype))
        position, before = self.position, list[_Chunk]()
        for number, parts_of_round in enumerate(_rounds(staged)):
            chunks = self._stage(parts_of_round)
            self._synchronize() if number else self._arrive(fingerprint)
            self._copy_results(before)
            if not number:
                self._reduce_mapped(mapped, op, divisor)
            for chunk in chunks:
                own = chunk.cuts[position]
                arrays_of_cut = [copy[own] for copy in chunk.staged]
                arrays_of_cut[position] = chunk.target[own]
                reduce_everywhere(arrays_of_cut, position, op, chunk.dtype, divisor, chunk.source[own])
            before = chunks
        self._synchronize()
        self._copy_results(before)

    def _reduce_mapped(self, mapped: Sequence[tuple[list[Array], str]], op: Op, divisor: int) -> None:
        """Reduce this member's slices of everyone's memory, and write the results to all of them."""
        for parts, dtype in mapped:
            own = slices(parts[0].size, self.size, parts[0].itemsize)[self.position]
            reduce_everywhere([part[own] for part in parts], self.position, op, dtype, divisor)

    def _stage(self, parts: Sequence[_Part]) -> list[_Chunk]:
        """Copy what others reduce of a round to this member's staging buffer."""
        staging, chunks = self._next_staging(), []
        for array, source, dtype, start, stop, offset in parts:
            target, mine = array[start:stop], source[start:stop]
            staged = [whole[offset : offset + target.nbytes].view(target.dtype) for whole in staging]
            cuts = slices(target.size, self.size, target.itemsize)
            for i, cut in enumerate(cuts):
                if i != self.position:
                    np.copyto(staged[self.position][cut], mine[cut])
            chunks.append(_Chunk(target, mine, dtype, staged, cuts))
        return chunks

    def _copy_results(self, chunks: Sequence[_Chunk]) -> None:
        """Copy the slices that others have reduced from this member's staging buffer to where they belong."""
        for chunk in chunks:
            for i, cut in enumerate(chunk.cuts):
                if i != self.position:
                    np.copyto(chunk.target[cut], chunk.staged[self.position][cut])


def _small_bytes(members: int) -> int:
    """Up to this size every member reads everything: one barrier instead of two."""
    return max(SMALL_BYTES // 2, 2 * SMALL_BYTES // members)


def _rounds(arrays: Sequence[tuple[Array, Array, str]]) -> list[list[_Part]]:
    """Cut arrays, given with source and dtype, into the parts of rounds; at least one round, perhaps empty."""
    rounds: list[list[_Part]] = [[]]
    filled = 0
    for array, source, dtype in arrays:
        start = 0
        while start < array.size:
            left = (array.size - start) * array.itemsize
            if ROUND_BYTES - filled < min(left, _SMALLEST_CHUNK_BYTES):
                rounds.append([])
                filled = 0
            taken = min(left, ROUND_BYTES - filled)
            stop = start + taken // array.itemsize
            rounds[-1].append((array, source, dtype, start, stop, filled))
            filled += -(-taken // CACHE_LINE) * CACHE_LINE
            start = stop
    return rounds
