"""All-reduce between hosts: algorithms for one chunk, and a pipeline of chunks.

**Pipeline.** A large array is cut into chunks, and each chunk goes through a fixed number of rounds. While the oldest
chunk is in its last round, later ones are in earlier rounds, so the network moves some chunks while the processor
reduces others. All members take the same steps in the same order, so their messages match without being numbered.

**Algorithms.** With all of them each host sends 2(n-1)/n times the data, which is the minimum (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). They differ in rounds and connections:

- `PairExchange`: two members send each other everything, and both reduce it. One round.
- `Butterfly`: a chunk is cut into one part per member of a small group. Each member reduces its part with the others of
  its group, then a part of that part with a second group, and so on (`butterfly`): a reduce-scatter. Then the results
  return the same way: an all-gather. Up to seven members form a single group, which takes two rounds in all.
- `Ring`: members talk only to their two neighbors. Parts are passed around and added to for n-1 rounds, and the results
  are passed around for n-1 more. This is the ring of NCCL and Horovod (Baidu, 2017).

The butterfly takes a few rounds where the ring takes hundreds, at the same number of bytes. It would need large groups
if the number of members had a large prime factor, and a switch drops packets when many hosts send to one at the same
time (incast). There the ring is used. NCCL's double binary trees were rejected: they take as many rounds as the
butterfly, for messages too large for one round, and need more code.

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
from ring_plugins.core.base.types import Array, Bytes
from ring_plugins.core.collectives.butterfly import radices, rounds
from ring_plugins.core.collectives.fingerprint import Fingerprint
from ring_plugins.core.collectives.net_group import NetworkGroup, PendingHeaders
from ring_plugins.core.net.transport import Request

#: Largest group of a butterfly; where it would need a larger one, the ring is used.
LARGEST_GROUP = 32
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
        nbytes: size of the whole array.
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
        self._sizes = [nbytes] * group.size
        #: By round, until they are checked.
        self._headers: list[PendingHeaders | None] = []
        self._unsent: deque[Request] = deque()

    def introduce(self, number: int, members: Sequence[int]) -> None:
        """Send headers to the `members` with whom chunks are exchanged in a round, before the first chunk is."""
        if number == len(self._headers):
            self._headers.append(self.group.send_headers(self._sizes, self._sizes, self._fingerprint, members))

    def send(self, pieces: Sequence[tuple[Sequence[int], Array]]) -> None:
        """Start to send each piece to some members; the pieces must not change before `finish_sending`."""
        outgoing: list[tuple[int, Bytes]] = []
        for members, piece in pieces:
            if piece.size:
                data = self.codec.pack(piece).view(np.uint8)
                outgoing += [(member, data) for member in members]
        if outgoing:
            self._unsent.append(self.group.exchange(outgoing, ()))

    def progress(self) -> None:
        """Advance the sends, and forget those that are done."""
        with contextlib.suppress(PeerFailed):  # the next wait raises it, with the reason
            while self._unsent and self._unsent[0].done():
                self._unsent.popleft()

    def finish_sending(self) -> None:
        """Wait until everything is sent, after which the memory may change."""
        self.group.wait(self._unsent, self._fingerprint, spin=False)
        self._unsent.clear()

    def receive(self, buffers: Sequence[tuple[int, Array]]) -> Request:
        """Start to fill buffers with what members send."""
        return self.group.exchange((), [(member, buffer.view(np.uint8)) for member, buffer in buffers])

    def wait(self, number: int, pending: Request) -> None:
        """Wait for the transfers of a chunk in a round, and the first time for the headers of that round too.

        Raises:
            MismatchError: a member is in another operation.
        """
        headers = self._headers[number] if number < len(self._headers) else None
        if headers is not None:
            self.group.check_headers(headers)
            self._headers[number] = None
        self.group.wait([pending], self._fingerprint, spin=False)

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
        reduction.introduce(0, [self._peer])
        outgoing, incoming = self._packed.view(np.uint8), self._term.view(np.uint8)
        self._pending = reduction.group.exchange([(self._peer, outgoing)], [(self._peer, incoming)])

    def advance(self) -> bool:
        reduction, chunk = self._reduction, self._chunk
        reduction.wait(0, self._pending)  # for the send too, since the sum overwrites what is sent
        if chunk.size:
            mine = chunk if reduction.codec.exact else reduction.unpacked(self._packed, chunk)
            theirs = reduction.unpacked(self._term, chunk)
            # Both members add rounded numbers in member order, so they get the same bits.
            reduction.combine(chunk, [mine, theirs] if self._peer else [theirs, mine], rounded=False)
        reduction.return_term(self._term)
        return True


class Butterfly:
    """A chunk that groups of members reduce and scatter, round by round, and then gather in the opposite order."""

    def __init__(self, reduction: Reduction, chunk: Array) -> None:
        self._reduction, self._position = reduction, reduction.group.position
        self._groups = rounds(reduction.group.size, self._position)
        #: By group, the parts of what this member reduced with the group before.
        self._parts: list[list[Array]] = []
        #: Rounds of the reduce-scatter, then rounds of the all-gather.
        self._round = 0
        self._scatter(chunk)

    def _scatter(self, piece: Array) -> None:
        """Begin a round of the reduce-scatter: everyone sends the others of its group their parts of a piece."""
        reduction, group = self._reduction, self._groups[self._round]
        parts = [piece[cut] for cut in slices(piece.size, len(group), piece.itemsize)]
        self._parts.append(parts)
        me, others = self._me_and_others(group)
        reduction.introduce(self._round, [group[i] for i in others])
        self._receive(group, {i: reduction.take_term(parts[me]) for i in others})
        reduction.send([([group[i]], parts[i]) for i in others])

    def _gather(self) -> None:
        """Begin a round of the all-gather: everyone sends the others of its group its part."""
        reduction, group, parts = self._reduction, self._groups[self._level], self._parts[self._level]
        me, others = self._me_and_others(group)
        self._receive(group, {i: reduction.codec.receive_buffer(parts[i]) for i in others})
        reduction.send([([group[i] for i in others], parts[me])])

    @property
    def _level(self) -> int:
        """Which group exchanges in this round."""
        return min(self._round, 2 * len(self._groups) - 1 - self._round)

    def _me_and_others(self, group: Sequence[int]) -> tuple[int, list[int]]:
        """This member's place in a group, and the others' from the next one on, so that not all send to one first."""
        me = group.index(self._position)
        return me, [(me + step) % len(group) for step in range(1, len(group))]

    def _receive(self, group: Sequence[int], buffers: dict[int, Array]) -> None:
        self._received = buffers
        self._pending = self._reduction.receive([(group[i], buffer) for i, buffer in buffers.items()])

    def advance(self) -> bool:
        reduction, last = self._reduction, len(self._groups) - 1
        reduction.wait(self._round, self._pending)
        parts, received = self._parts[self._level], self._received
        if self._round > last:
            for i, data in received.items():
                reduction.codec.unpack(data, parts[i])
            self._round += 1
            if self._round > 2 * last + 1:
                return True
            self._gather()
            return False
        mine = parts[self._groups[self._level].index(self._position)]
        if mine.size:
            terms = [reduction.unpacked(term, mine) for term in received.values()]
            reduction.combine(mine, [mine, *terms], is_result=self._round == last)
        self._round += 1
        self._scatter(mine) if self._round <= last else self._gather()
        for term in received.values():
            reduction.return_term(term)
        return False


class Ring:
    """A chunk whose parts are passed around the members twice: once to be added to, once as results."""

    def __init__(self, reduction: Reduction, chunk: Array) -> None:
        self._reduction, group = reduction, reduction.group
        self._parts = [chunk[cut] for cut in slices(chunk.size, group.size, chunk.itemsize)]
        self._round, self._last_sum = 0, group.size - 2
        self._next, self._previous = (group.position + 1) % group.size, (group.position - 1) % group.size
        reduction.introduce(0, group.others)
        reduction.send([([self._next], self._parts[group.position])])
        self._receive()

    def _receive(self) -> None:
        """Start to receive this round's part."""
        reduction, group = self._reduction, self._reduction.group
        self._part = part = self._parts[(group.position - 1 - self._round) % group.size]
        is_term = self._round <= self._last_sum
        self._buffer = reduction.take_term(part) if is_term else reduction.codec.receive_buffer(part)
        self._pending = reduction.receive([(self._previous, self._buffer)])

    def advance(self) -> bool:
        reduction, part = self._reduction, self._part
        reduction.wait(self._round, self._pending)
        if part.size and self._round <= self._last_sum:
            reduction.combine(part, [part, reduction.unpacked(self._buffer, part)], self._round == self._last_sum)
            reduction.return_term(self._buffer)
        elif part.size:
            reduction.codec.unpack(self._buffer, part)
        if self._round == 2 * self._last_sum + 1:
            return True
        self._round += 1
        reduction.send([([self._next], part)])
        self._receive()
        return False


#: Starts the reduction of a chunk.
Algorithm = Callable[[Reduction, Array], ChunkReduction]


def choose_algorithm(members: int, nbytes: int) -> tuple[Algorithm, int]:
    """Choose the algorithm for a message of `nbytes`; return it and its number of rounds."""
    if members == 2 and nbytes <= PAIR_EXCHANGE_BYTES:
        return PairExchange, 1
    split = radices(members)
    return (Butterfly, 2 * len(split)) if split[0] <= LARGEST_GROUP else (Ring, 2 * (members - 1))


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
