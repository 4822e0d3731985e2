"""Two levels: what several hosts do together passes through their ranks' shared memory and over the network.

**Problem.** If all ranks exchange with all others, a byte that all ranks of a host need crosses the host's network card
once for each of them, and a job of n ranks keeps n(n-1)/2 connections.

**Idea.** NCCL and Horovod call it hierarchical: every byte enters a host once. As in rail-optimized networks, the work
between hosts is shared: ranks of equal local rank on all hosts form a *rail*, a `NetworkGroup` of their own, and only
the members of a rail exchange data between hosts. As many processes of a host send at once as there are rails, which is
the number of ranks on the smallest host. Small operations use the first rail only, so that a host sends each other host
one message.

**Pipeline.** `TwoLevels.run` cuts an operation into pieces, and takes each through three stages: within the host,
between hosts, within the host. In each step the ranks of a host

1. give a piece: each puts what others need of it into input buffers that all of the host map,
2. end a round of the older pieces that are between hosts, if they belong to a rail,
3. pass a barrier, after which rails combine the new piece, where numbers are reduced, and start to transfer it,
4. take what ranks of their own host gave in this step, and what rails have of the oldest piece, in result buffers.

Two input buffers alternate, and two result buffers. A buffer is written again two steps later, and the barrier of the
step in between comes after everyone's reads. The last step reads only result buffers, and the next operation writes
those after its first barrier. A collective is a recipe for these stages: `HierarchicalAllReduce` below, and the others
in hierarchical_collectives.py.

**All-reduce.** Each rail combines its slice of a piece from all ranks of the host, reduces it with the other hosts
(`algorithms`), and leaves the result for the host. Between hosts a piece takes several rounds, one in each step, so
several pieces are under way, and the newest one has a whole step for its first round. Memory that all ranks of a host
map needs no buffers: each rail reads and writes everyone's, without a barrier between the pieces. All ranks of a host
have the same kind of memory, because they allocate together and call with equal sizes.

**Progress.** While a rank waits at a barrier, and pieces are under way, it keeps its rail's transfers moving. The
others may be waiting for a remote host that itself waits for data that this rank still has to send; where the kernel
buffers little, two hosts could block each other forever.

**Averages.** The sum is divided once, at the end, with two exceptions. The largest float16 is 65,504, so a host's sum
may overflow where the average does not: the sum is first scaled down by a power of two, which costs no precision, and
divided by the rest at the end. Numbers that are rounded to 16 bits for the network are divided before that, for the
same reason.

**Mismatches.** The ranks of a host compare fingerprints at the first barrier, and rails between hosts. Whoever finds a
mismatch tells the ranks that wait for it, so all ranks raise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_into
from ring_plugins.core.arrays.codec import Codec, IdentityCodec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import CACHE_LINE, slices
from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.algorithms import Reduction, choose_algorithm, radices, reduce_small
from ring_plugins.core.collectives.fingerprint import Fingerprint
from ring_plugins.core.collectives.net_group import SMALL_BYTES, NetworkGroup
from ring_plugins.core.collectives.shm_group import CHUNK_STAGING_BYTES, SharedMemoryGroup

#: Bytes of one message of a piece: large enough that Python's overhead is small, small enough that the last message,
#: which nothing overlaps, is short.
_MESSAGE_BYTES = 256 * 1024
_SMALLEST_MESSAGE_BYTES = 64 * 1024
#: An array is cut into about this many pieces, within the limits above.
_PIECES = 4
#: A message is small if a host that receives the whole sums of others then receives no more than this. With two hosts,
#: cutting it into parts would not make a host receive less.
_SMALL_RECEIVED_BYTES = 256 * 1024

#: Does one part of a step.
Part = Callable[[int], None]
#: The transfer of a piece: the first `next` starts it, and each further one ends a round.
Transfer = Callable[[NetworkGroup, int], Iterator[None]]


def nothing(step: int) -> None:
    """The part of a step in which there is nothing to do."""


class TwoLevels:
    """One member's side of the pipeline of a communicator that spans hosts.

    Args:
        node: the members of this host, None where this is the only one.
        rail: the members of equal local rank on all hosts, in the order of `hosts`; None if a host has no such one.
        hosts: by host, the positions of its members in the communicator.
        position: of this member in the communicator.

    Attributes:
        node, rail, hosts, position: as given.
        host: which of them is this one.
        local_rank: position on it.
        rails: number of rails.
    """

    def __init__(
        self, node: SharedMemoryGroup | None, rail: NetworkGroup | None, hosts: Sequence[Sequence[int]], position: int
    ) -> None:
        self.node, self.rail, self.position, self.hosts = node, rail, position, tuple(map(tuple, hosts))
        self.host = self.host_of(position)
        self.local_rank = self.hosts[self.host].index(position)
        self.rails = min(map(len, hosts))
        self._staging = [np.empty(4 * CHUNK_STAGING_BYTES, np.uint8)] if node is None else node.chunk_staging
        self._buffers: dict[np.dtype[Any], tuple[list[list[Array]], list[list[Array]]]] = {}

    def buffers(self, storage: np.dtype[Any]) -> tuple[list[list[Array]], list[list[Array]]]:
        """The input and the result buffers for a type, by the parity of the step, then by local rank."""
        if storage not in self._buffers:
            quarters = [slice(i * CHUNK_STAGING_BYTES, (i + 1) * CHUNK_STAGING_BYTES) for i in range(4)]
            made = [[whole[quarter].view(storage) for whole in self._staging] for quarter in quarters]
            self._buffers[storage] = made[:2], made[2:]
        return self._buffers[storage]

    def host_of(self, position: int) -> int:
        return next(host for host, members in enumerate(self.hosts) if position in members)

    def run(
        self,
        fingerprint: Fingerprint,
        steps: int,
        rails: int,
        give: Part,
        transfer: Transfer,
        take_local: Part = nothing,
        take_remote: Part = nothing,
        rounds: int = 1,
        lag: int = 0,
        in_place: bool = False,
    ) -> None:
        """Run an operation.

        Args:
            fingerprint: of the operation.
            steps: number of pieces, at least one.
            rails: how many rails it uses.
            give: puts this rank's part of a piece into input buffers.
            transfer: moves a piece between hosts; called where this rank belongs to a rail in use.
            take_local: takes what ranks of this host gave from the input buffers.
            take_remote: takes what rails have in the result buffers.
            rounds: of a transfer.
            lag: steps that a transfer is given before its first round ends.
            in_place: whether the ranks of a host need no barrier between the pieces, but one at the end.
        """
        rail = self.rail if self.local_rank < rails else None
        barriers = self.node.barriers if self.node is not None else None
        meanwhile = rail.progress if rail is not None and lag else None
        delay = rounds + lag
        under_way: deque[tuple[int, Iterator[None]]] = deque(maxlen=delay)  # the oldest ends when another one starts
        try:
            for step in range(steps + delay):
                if step < steps:
                    give(step)
                for piece in [one for number, one in under_way if number + lag < step]:
                    next(piece, None)
                if meanwhile is not None:
                    meanwhile()  # what the next round sends leaves now
                if barriers is not None and step == 0:
                    barriers.arrive(fingerprint, meanwhile)
                elif barriers is not None and not in_place and (step < steps or step >= delay):
                    barriers.synchronize(meanwhile=meanwhile)
                if step < steps:
                    if rail is not None:  # not before this host's ranks agree: others take it for the host's word
                        under_way.append((step, transfer(rail, step)))
                        next(under_way[-1][1], None)
                        rail.progress()
                    take_local(step)
                if step >= delay:
                    take_remote(step - delay)
            for _, piece in under_way:
                next(piece, None)
            if barriers is not None and in_place:
                barriers.synchronize()
        except MismatchError as error:
            self.report_mismatch(error)
            raise

    def report_mismatch(self, error: MismatchError) -> None:
        """Tell the ranks that wait for this one, on its host and on others, of a mismatch that it found.

        Between hosts the first rail is enough: its members take part in every operation, and tell their hosts.
        """
        if self.node is not None:
            self.node.barriers.report_mismatch(error)
        if self.rail is not None and self.local_rank == 0:
            self.rail.report_mismatch(error)


class HierarchicalAllReduce:
    """One member's side of the all-reduces of a communicator that spans hosts; implements `Reducer`.

    Args:
        levels: of the communicator.
    """

    def __init__(self, levels: TwoLevels) -> None:
        self._levels, self._size = levels, sum(map(len, levels.hosts))
        self._largest_small = largest_small(len(levels.hosts))

    def all_reduce(
        self, array: Array, source: Array, op: Op, dtype: str, codec: Codec | None, fingerprint: Fingerprint
    ) -> None:
        """As in `Reducer`."""
        levels, codec = self._levels, codec or IdentityCodec()
        node, me, hosts = levels.node, levels.local_rank, len(levels.hosts)
        before, after = average_divisors(self._size, dtype, not codec.exact) if op is Op.AVERAGE else (1.0, 1.0)
        is_small = array.nbytes <= self._largest_small
        rails, length, rounds = 1, max(array.size, 1), 1
        if not is_small:
            rails, length = levels.rails, piece_bytes(array.nbytes, levels.rails, hosts) // array.itemsize
            algorithm, rounds = choose_algorithm(hosts, array.nbytes)
            if levels.rail is not None:
                reduction = Reduction(levels.rail, op, dtype, after, codec, array.nbytes, fingerprint)
        steps = -(-array.size // length) or 1
        inputs, results = levels.buffers(array.dtype)
        mapped = node.mapped(array) if node is not None else None
        if mapped is not None and source is not array:
            np.copyto(array, source)
            source = array

        def piece_of(whole: Array, step: int) -> Array:
            return whole[step * length : (step + 1) * length]

        def cuts(step: int) -> Sequence[slice]:
            """The rails' slices of a piece."""
            return slices(min(length, array.size - step * length), rails, array.itemsize)

        def give(step: int) -> None:
            mine, staged = piece_of(source, step), inputs[step & 1][me]
            for rail, cut in enumerate(cuts(step)):
                if rail != me:
                    np.copyto(staged[cut], mine[cut])

        def transfer(rail: NetworkGroup, step: int) -> Iterator[None]:
            cut = cuts(step)[me]
            target = piece_of(array, step)[cut]
            mine = target if source is array else piece_of(source, step)[cut]
            pieces = inputs[step & 1] if mapped is None else [piece_of(whole, step) for whole in mapped]
            others = [piece[cut] for i, piece in enumerate(pieces) if i != me]
            reduce_into(target, [mine, *others], op, dtype, before)
            if is_small:
                reduce_small(rail, target, op, dtype, after, codec, fingerprint)
            else:
                yield from algorithm(reduction, target)
            if mapped is not None:
                for other in others:
                    np.copyto(other, target)
            elif node is not None:
                np.copyto(results[step & 1][me][cut], target)
            if not is_small and step == steps - 1:
                yield  # nobody waits for what this rank still sends, but the memory may not change before
                reduction.finish_sending()

        def take(step: int) -> None:
            result = piece_of(array, step)
            for rail, cut in enumerate(cuts(step)):
                if rail != me:
                    np.copyto(result[cut], results[step & 1][rail][cut])

        if mapped is not None:
            give = take = nothing
        levels.run(
            fingerprint,
            steps,
            rails,
            give,
            transfer,
            take_remote=take,
            rounds=rounds,
            lag=0 if is_small else 1,
            in_place=mapped is not None,
        )


def largest_small(hosts: int) -> int:
    """Bytes of the largest message that is not cut."""
    return max(SMALL_BYTES, _SMALL_RECEIVED_BYTES // sum(radix - 1 for radix in radices(hosts)))


def piece_bytes(nbytes: int, rails: int, hosts: int) -> int:
    """Bytes of a piece, the same on all ranks; a multiple of the cache lines that its parts are aligned to."""
    parts = rails * hosts
    wanted = min(max(nbytes // _PIECES, parts * _SMALLEST_MESSAGE_BYTES), parts * _MESSAGE_BYTES, CHUNK_STAGING_BYTES)
    return max(wanted // (CACHE_LINE * parts), 1) * CACHE_LINE * parts


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
