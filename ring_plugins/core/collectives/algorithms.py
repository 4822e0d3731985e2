"""All-reduce between hosts: algorithms for one chunk, and a pipeline of chunks.

**Pipeline.** A large array is cut into chunks, and each chunk goes through a number of rounds. While the oldest chunk
is in its last round, later ones are in earlier rounds: what a round sends is under way while the processor reduces
other chunks. All members take the same steps in the same order, so their messages match without being numbered.

**Algorithms.** All of them send 2(n-1)/n of the data from every host, which is the least there is (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). They differ in rounds and connections:

- `PairExchange`: two members send each other everything, and both reduce it. One round.
- `Direct`: a chunk is cut into one part a member. Everyone sends every member its part, and each member reduces its
  part and sends the result to everyone: reduce-scatter and all-gather in one round each, over connections among all.
- `Ring`: members talk to their two neighbors only. A part is passed on and added to n-1 times, then passed on n-1 times
  more: 2(n-1) rounds. It is NCCL's and Horovod's ring (Baidu, 2017).

Direct has the fewest rounds, and on a switch that gives every host its full rate it is never slower than the ring,
until the parts get small and the senders many: a host to which many send at once loses packets in the switch (incast).
So the ring takes over at `RING_FROM` hosts. Trees (NCCL's double binary tree) and recursive halving were left out: they
save rounds where messages are small, and those are sent in one round anyway (`hierarchical`).

Where a codec rounds numbers to 16 bits, the member that computed a result rounds it as well, so all keep the same bits.
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

#: From this many hosts on chunks go in a ring.
RING_FROM = 16
#: Up to this size two hosts exchange everything in one round, which spares processor time. Larger messages gain more
#: from the shorter pieces of two rounds, which stay in the caches, and one round is under way while the other waits.
PAIR_EXCHANGE_BYTES = 2 * 1024 * 1024


class Reduction:
    """One all-reduce of a network group: what is computed with its chunks, and its messages and buffers.

    Args:
        group: the members.
        op, dtype: as in `reduce_into`.
        divisor: the result is divided by this.
        codec: encodes what is sent.
        nbytes: size of the whole array; its header leaves at once.
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
        """Start sending a piece to some members; it must not change before `finish_sending`."""
        if piece.size:
            data = self.codec.pack(piece).view(np.uint8)
            self._unsent += [(member, self.group.send(member, data)) for member in members]

    def progress(self) -> None:
        """Start what can be sent now, and forget what has been sent."""
        with contextlib.suppress(PeerFailed):  # the next wait raises it, and finds out why
            while self._unsent and self._unsent[0][1].done():
                del self._unsent[0]

    def finish_sending(self) -> None:
        """Wait until everything is sent, after which the memory may change."""
        self.group.wait_each(self._unsent, self._fingerprint, spin=False)
        self._unsent = []

    def receive(self, member: int, buffer: Array) -> Request:
        return self.group.receive(member, buffer.view(np.uint8))

    def wait(self, pending: Sequence[tuple[int, Request]]) -> None:
        """Wait for a round's transfers, the first time also for the other members' headers.

        Raises:
            MismatchError: they are in another operation.
        """
        if self._headers is not None:
            self.group.check_headers(self._headers)
            self._headers = None
        self.group.wait_each(pending, self._fingerprint, spin=False)

    def take_term(self, piece: Array) -> Array:
        """A buffer to receive a term of a sum into; to be returned with `return_term`."""
        if not self.codec.exact:
            return self.codec.receive_buffer(piece)
        return self.group.take_buffer(piece.nbytes).view(piece.dtype)

    def return_term(self, term: Array) -> None:
        if self.codec.exact:
            self.group.return_buffer(term)

    def unpacked(self, received: Array, piece: Array) -> Array:
        """What was received for a piece, as numbers."""
        if self.codec.exact:
            return received
        term = np.empty_like(piece)
        self.codec.unpack(received, term)
        return term

    def combine(self, target: Array, terms: Sequence[Array], is_result: bool = True, rounded: bool = True) -> None:
        """Reduce `terms` into `target`, one of them.

        Args:
            target, terms: as in `reduce_into`.
            is_result: whether these are the last terms; the result is divided then.
            rounded: whether to round a result as the codec rounds what others get.
        """
        reduce_into(target, terms, self._op, self._dtype, self._divisor if is_result else 1)
        if is_result and rounded and not self.codec.exact:
            self.codec.unpack(self.codec.pack(target), target)


class ChunkReduction(Protocol):
    """A chunk under way. It is reduced in place."""

    def advance(self) -> bool:
        """Wait for what this round receives, and start the next round; return whether the chunk is finished."""


class PairExchange:
    """A chunk of two members, which send each other everything and both reduce it: one round."""

    def __init__(self, reduction: Reduction, chunk: Array) -> None:
        self._reduction, self._chunk = reduction, chunk
        self._packed, self._term = reduction.codec.pack(chunk), reduction.take_term(chunk)
        (self._peer,) = reduction.group.others
        outgoing, incoming = self._packed.view(np.uint8), self._term.view(np.uint8)
        self._pending = [(self._peer, reduction.group.exchange(self._peer, outgoing, incoming))] if chunk.size else []

    def advance(self) -> bool:
        reduction, chunk = self._reduction, self._chunk
        reduction.wait(self._pending)  # until the own numbers have left too, since the sum takes their place
        if chunk.size:
            mine = chunk if reduction.codec.exact else reduction.unpacked(self._packed, chunk)
            theirs = reduction.unpacked(self._term, chunk)
            # In the order of the members, and of rounded numbers, so that both get the same bits.
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
    """The algorithm for the chunks of a message of `nbytes` among so many members, and its number of rounds."""
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

        A chunk is finished as many steps later as its algorithm has rounds.
        """
        older = list(self._chunks)
        if chunk is not None:
            self._chunks.append(self._algorithm(self._reduction, chunk))
        for one in older:
            if one.advance():
                self._chunks.popleft()
        self._reduction.progress()

    def finish(self) -> None:
        """Wait until everything is sent, after which the memory may change."""
        self._reduction.finish_sending()
