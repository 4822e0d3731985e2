"""All-reduce between hosts: algorithms for one chunk, and a pipeline of chunks.

**Pipeline.** A large array is cut into chunks, and each chunk goes through a fixed number of rounds. While the oldest
chunk is in its last round, later ones are in earlier rounds, so the network moves some chunks while the processor
reduces others. All members take the same steps in the same order, so their messages match without being numbered.

**Algorithms.** With all of them each host sends 2(n-1)/n times the data, which is the minimum (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). They differ in rounds and connections:

- `PairExchange`: two members send each other everything, and both reduce it. One round.
- `Direct`: a chunk is cut into one part per member. Each member sends every other member that member's part, reduces
  its own part and sends the result to all others: a reduce-scatter and an all-gather of one round each, over
  connections among all members.
- `Ring`: members talk only to their two neighbors. Parts are passed around and added to for n-1 rounds, and the results
  are passed around for n-1 more. This is the ring of NCCL and Horovod (Baidu, 2017).

Direct needs only two rounds, and on a switch that gives every host its full rate it is never slower than the ring while
hosts are few. With many hosts the parts get small, and a switch drops packets when many hosts send to one at the same
time (incast). So the ring takes over at `RING_FROM` hosts. Trees (NCCL's double binary tree) and recursive halving were
rejected: they save rounds for small messages, which take only one round anyway (`hierarchical`).

Where a codec rounds numbers to 16 bits, the member that computed a result rounds its own copy too, so that all members
end up with the same bits.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_into
from ring_plugins.core.arrays.codec import Codec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import slices
from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.fingerprint import Fingerprint
from ring_plugins.core.collectives.net_group import NetworkGroup, PendingHeaders
from ring_plugins.core.net.transport import Request

#: Number of hosts from which the ring is used.
RING_FROM = 16
#: Up to this size two hosts exchange everything in one round, which takes less processor time. Larger messages gain
#: more from two rounds: their pieces are shorter and stay in the caches, and one round's data moves while the other
#: waits.
PAIR_EXCHANGE_BYTES = 2 * 1024 * 1024


class Reduction:
    """One all-reduce of a network group: sends, receives and reduces pieces of its chunks.

    Args:
        group: the members.
        op, dtype: as in `reduce_into`.
        divisor: the result is divided by this.
        codec: encodes what is sent.
        nbytes: size of the whole array; the headers are sent at once.
        fingerprint: of the operation.
    """

    def __init__(
        self,
        group: NetworkGroup,
        op: Op,
        dtype: str,
        divisor: float,
        codec: Codec,
        nbytes: int,
        fingerprint: Fingerprint,
    ) -> None:
        self.group, self.codec = group, codec
        self._op, self._dtype, self._divisor, self._fingerprint = op, dtype, divisor, fingerprint
        sizes = [nbytes] * group.size
        self._headers: PendingHeaders | None = group.send_headers(sizes, sizes, fingerprint)
        self._unsent: list[tuple[int, Request]] = []

    def send(self, members: Sequence[int], piece: Array) -> None:
        """Start sending a piece to some members; the piece must not change before `finish_sending`."""
        if piece.size:
            data = self.codec.pack(piece).view(np.uint8)
            self._unsent += [(member, self.group.send(member, data)) for member in members]

    def progress(self) -> None:
        """Advance the sends, and forget those that are done."""
        with contextlib.suppress(PeerFailed):  # the next wait raises it, with the reason
            while self._unsent and self._unsent[0][1].done():
                del self._unsent[0]

    def finish_sending(self) -> None:
        """Wait until everything is sent, after which the memory may change."""
        self.group.wait_each(self._unsent, self._fingerprint, spin=False)
        self._unsent = []

    def receive(self, member: int, buffer: Array) -> Request:
        return self.group.receive(member, buffer.view(np.uint8))

    def wait(self, pending: Sequence[tuple[int, Request]]) -> None:
        """Wait for a round's transfers, and the first time for the other members' headers too.

        Raises:
            MismatchError: a member is in another operation.
        """
        if self._headers is not None:
            self.group.check_headers(self._headers)
            self._headers = None
        self.group.wait_each(pending, self._fingerprint, spin=False)

    def take_term(self, piece: Array) -> Array:
        """Return a buffer that receives a term of a sum; `return_term` takes it back."""
        if not self.codec.exact:
            return self.codec.receive_buffer(piece)
        return self.group.take_buffer(piece.nbytes).view(piece.dtype)

    def return_term(self, term: Array) -> None:
        if self.codec.exact:
            self.group.return_buffer(term)

    def unpacked(self, received: Array, piece: Array) -> Array:
        """Decode the data received for a piece."""
        if self.codec.exact:
            return received
        term = np.empty_like(piece)
        self.codec.unpack(received, term)
        return term

    def combine(self, target: Array, terms: Sequence[Array], is_result: bool = True, rounded: bool = True) -> None:
        """Reduce `terms` into `target`, which may be one of them.

        Args:
            target, terms: as in `reduce_into`.
            is_result: whether these are the last terms, so that the result is to be divided.
            rounded: whether to round a result as the codec rounds the copies for other members.
        """
        reduce_into(target, terms, self._op, self._dtype, self._divisor if is_result else 1)
        if is_result and rounded and not self.codec.exact:
            self.codec.unpack(self.codec.pack(target), target)


class ChunkReduction(Protocol):
    """A chunk that is being reduced, in place."""

    def advance(self) -> bool:
        """Wait for this round's data and start the next round; return whether the chunk is finished."""


class PairExchange:
    """A chunk that two members send each other as a whole and both reduce: one round."""

    def __init__(self, reduction: Reduction, chunk: Array) -> None:
        self._reduction, self._chunk = reduction, chunk
        self._packed, self._term = reduction.codec.pack(chunk), reduction.take_term(chunk)
        (self._peer,) = reduction.group.others
        outgoing, incoming = self._packed.view(np.uint8), self._term.view(np.uint8)
        self._pending = [(self._peer, reduction.group.exchange(self._peer, outgoing, incoming))] if chunk.size else []

    def advance(self) -> bool:
        reduction, chunk = self._reduction, self._chunk
        reduction.wait(self._pending)  # for the send too, since the sum overwrites what is sent
        if chunk.size:
            mine = chunk if reduction.codec.exact else reduction.unpacked(self._packed, chunk)
            theirs = reduction.unpacked(self._term, chunk)
            # Both members add rounded numbers in member order, so they get the same bits.
            reduction.combine(chunk, [mine, theirs] if self._peer else [theirs, mine], rounded=False)
        reduction.return_term(self._term)
        return True


class Direct:
    """A chunk of which every member reduces one part: a reduce-scatter round, then an all-gather round."""

    def __init__(self, reduction: Reduction, chunk: Array) -> None:
        self._reduction, group = reduction, reduction.group
        self._parts = [chunk[cut] for cut in slices(chunk.size, group.size, chunk.itemsize)]
        self._mine = mine = self._parts[group.position]
        #: The other members, beginning with the next one, so that not all send to the same member first.
        self._peers = [(group.position + step) % group.size for step in range(1, group.size)]
        self._results: dict[int, Array] | None = None
        self._terms = {i: reduction.take_term(mine) for i in group.others}
        self._pending = [(i, reduction.receive(i, term)) for i, term in self._terms.items() if mine.size]
        for i in self._peers:
            reduction.send([i], self._parts[i])

    def advance(self) -> bool:
        reduction, mine = self._reduction, self._mine
        reduction.wait(self._pending)
        if self._results is not None:
            for i, received in self._results.items():
                reduction.codec.unpack(received, self._parts[i])
            return True
        if mine.size:
            reduction.combine(mine, [mine, *(reduction.unpacked(term, mine) for term in self._terms.values())])
        self._results = {i: reduction.codec.receive_buffer(self._parts[i]) for i in reduction.group.others}
        self._pending = [(i, reduction.receive(i, buffer)) for i, buffer in self._results.items() if buffer.size]
        reduction.send(self._peers, mine)
        for term in self._terms.values():
            reduction.return_term(term)
        self._terms = {}
        return False


class Ring:
    """A chunk whose parts are passed around the members twice: once to be added to, once as results."""

    def __init__(self, reduction: Reduction, chunk: Array) -> None:
        self._reduction, group = reduction, reduction.group
        self._parts = [chunk[cut] for cut in slices(chunk.size, group.size, chunk.itemsize)]
        self._round, self._last_sum = 0, group.size - 2
        self._next, self._previous = (group.position + 1) % group.size, (group.position - 1) % group.size
        reduction.send([self._next], self._parts[group.position])
        self._receive()

    def _receive(self) -> None:
        """Start to receive this round's part."""
        reduction, group = self._reduction, self._reduction.group
        self._part = part = self._parts[(group.position - 1 - self._round) % group.size]
        is_term = self._round <= self._last_sum
        self._buffer = reduction.take_term(part) if is_term else reduction.codec.receive_buffer(part)
        self._pending = [(self._previous, reduction.receive(self._previous, self._buffer))] if part.size else []

    def advance(self) -> bool:
        reduction, part = self._reduction, self._part
        reduction.wait(self._pending)
        if part.size and self._round <= self._last_sum:
            reduction.combine(part, [part, reduction.unpacked(self._buffer, part)], self._round == self._last_sum)
            reduction.return_term(self._buffer)
        elif part.size:
            reduction.codec.unpack(self._buffer, part)
        if self._round == 2 * self._last_sum + 1:
            return True
        self._round += 1
        reduction.send([self._next], part)
        self._receive()
        return False


#: Starts the reduction of a chunk.
Algorithm = Callable[[Reduction, Array], ChunkReduction]


def choose_algorithm(members: int, nbytes: int) -> tuple[Algorithm, int]:
    """Choose the algorithm for a message of `nbytes`; return it and its number of rounds."""
    if members == 2 and nbytes <= PAIR_EXCHANGE_BYTES:
        return PairExchange, 1
    return (Direct, 2) if members < RING_FROM else (Ring, 2 * (members - 1))


class Pipeline:
    """The chunks of one all-reduce that are under way, oldest first."""

    def __init__(self, reduction: Reduction, algorithm: Algorithm) -> None:
        self._reduction, self._algorithm = reduction, algorithm
        self._chunks: deque[ChunkReduction] = deque()

    def step(self, chunk: Array | None) -> None:
        """Start a chunk, if there is one, and advance all older ones by a round.

        A chunk is finished after as many further steps as its algorithm has rounds.
        """
        older = list(self._chunks)
        if chunk is not None:
            self._chunks.append(self._algorithm(self._reduction, chunk))
        for started in older:
            if started.advance():
                self._chunks.popleft()
        self._reduction.progress()

    def finish(self) -> None:
        """Wait until everything is sent, after which the memory may change."""
        self._reduction.finish_sending()
