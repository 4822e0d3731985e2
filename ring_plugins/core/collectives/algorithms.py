"""All-reduce between hosts as a stream of chunks, so that adding, sending and receiving happen at the same time.

Every chunk goes through a number of rounds. While one is in its last round, later ones are in earlier rounds, and what
each round sends is under way while the processor adds up others. All members take the same steps in the same order, so
their messages match without being numbered.

Three ways, which all send 2(n-1)/n of the data from every host, the least there is (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms", 2009). A pair: two members send each other everything and both add it up, in one round.
Straight: a chunk is cut into one part a member; everyone sends every
member its part, the member adds them up and sends everyone the sum: two rounds, and a connection with everyone. In a
ring, members only talk to their neighbours, 2(n-1) rounds. Straight is never slower on a switch that gives every host
its full rate, until the parts get small and the senders many.

What is computed with the chunks of one all-reduce between hosts, and the memory and messages that takes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_into
from ring_plugins.core.arrays.codec import Codec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.fingerprint import Fingerprint
from ring_plugins.core.collectives.net_group import Announcement, NetworkGroup
from ring_plugins.core.collectives.shm_group import slices
from ring_plugins.core.net.transport import Request


class Reduction:
    """What to compute with the chunks of one operation.

    Args:
        lane: the members.
        op, dtype: as in `reduce_into`.
        divisor: the result is divided by this.
        wire: how numbers travel.
        signature: of the operation.
    """

    def __init__(
        self, lane: NetworkGroup, op: Op, dtype: str, divisor: float, codec: Codec, fingerprint: Fingerprint
    ) -> None:
        self.lane, self.op, self.dtype, self.divisor = lane, op, dtype, divisor
        self.codec, self.fingerprint = codec, fingerprint
        self._announcement: Announcement | None = None
        self.unsent: list[tuple[int, Request]] = []

    def announce(self, nbytes: int) -> None:
        """Tell the others what this is; once, before the first chunk."""
        sizes = [nbytes] * self.lane.size
        self._announcement = self.lane.announce(sizes, sizes, self.fingerprint)

    def check(self) -> None:
        """Before the first use of what others sent: are they in the same operation?"""
        if self._announcement is not None:
            self._announcement.check()
            self._announcement = None

    def send(self, members: Sequence[int], piece: Array) -> None:
        if piece.size:
            data = self.codec.pack(piece).view(np.uint8)
            self.unsent += [(member, self.lane.send(member, data)) for member in members]

    def receive(self, member: int, space: Array) -> Request:
        return self.lane.receive(member, space.view(np.uint8))

    def space(self, piece: Array) -> Array:
        """Where to receive a term of a sum; to be given back."""
        if not self.codec.exact:
            return self.codec.space(piece)
        memory = self.lane.spare.pop() if self.lane.spare else None
        if memory is None or memory.size < piece.nbytes:
            memory = np.empty(piece.nbytes, np.uint8)
        return memory[: piece.nbytes].view(piece.dtype)

    def give_back(self, memory: Array) -> None:
        """For the next chunk, or operation: fresh memory from the kernel would cost as much as receiving into it."""
        if self.codec.exact:
            while isinstance(memory.base, np.ndarray):
                memory = memory.base
            self.lane.spare.append(memory)

    def finish(self) -> None:
        """Wait until all is sent, after which the memory may change."""
        self.lane.await_each(self.unsent, self.fingerprint, spin=False)
        self.unsent = []

    def start_sending(self) -> None:
        """Let go what can, and keep no record of what has left."""
        with contextlib.suppress(PeerFailed):  # whoever waits is told, and why
            while self.unsent and self.unsent[0][1].done():
                del self.unsent[0]

    def unpacked(self, received: Array, piece: Array) -> Array:
        """What was received for a piece, as numbers."""
        if self.codec.exact:
            return received
        term = np.empty_like(piece)
        self.codec.unpack(received, term)
        return term

    def add(self, terms: Sequence[Array], last: bool) -> None:
        """Leave the sum of all in the first; after the last addition, what all will have: divided, and rounded."""
        first = terms[0]
        reduce_into(first, terms, self.op, self.dtype, self.divisor if last else 1)
        if last and not self.codec.exact:
            self.codec.unpack(self.codec.pack(first), first)


#: From this many hosts on data goes in a ring: a host that n-1 others send to at once drops packets in the switch.
RING_FROM = 16
#: Two hosts exchange messages of up to so many bytes in one round, which spares processor time. Larger ones gain more
#: from shorter pieces, which stay in the caches, and from two rounds, of which one is under way while the other waits.
PAIR_UP_TO = 2 * 1024 * 1024


class Pair:
    """A chunk of two members, who both add it up: one round."""

    def __init__(self, reduction: Reduction, chunk: Array) -> None:
        self._reduction, self._chunk = reduction, chunk
        self._packed, self._term = reduction.codec.pack(chunk), reduction.space(chunk)
        (self._other,) = reduction.lane.others
        sent, received = (memory.view(np.uint8) for memory in (self._packed, self._term))
        self._awaited = [(self._other, reduction.lane.swap(self._other, sent, received))] if chunk.size else []

    def advance(self) -> bool:
        """Wait for the other's numbers, and until the own have left, since the sum takes their place."""
        reduction, chunk = self._reduction, self._chunk
        reduction.check()
        reduction.lane.await_each(self._awaited, reduction.fingerprint, spin=False)
        if chunk.size:
            mine = chunk if reduction.codec.exact else reduction.unpacked(self._packed, chunk)
            theirs = reduction.unpacked(self._term, chunk)
            terms = [mine, theirs] if self._other else [theirs, mine]
            reduce_into(chunk, terms, reduction.op, reduction.dtype, reduction.divisor)
        reduction.give_back(self._term)
        return True


class Direct:
    """A chunk that goes straight between all members: two rounds."""

    def __init__(self, reduction: Reduction, chunk: Array) -> None:
        self._reduction, lane = reduction, reduction.lane
        self._parts = [chunk[cut] for cut in slices(chunk.size, lane.size, chunk.itemsize)]
        self._round = 0
        self._spaces: dict[int, Array] = {}
        mine = self._parts[lane.position]
        self._terms = {i: reduction.space(mine) for i in lane.others}
        self._awaited = [(i, reduction.receive(i, term)) for i, term in self._terms.items() if mine.size]
        for i in _from_the_next(lane):
            reduction.send([i], self._parts[i])

    def advance(self) -> bool:
        """Wait for what this round receives, and start the next; whether the chunk is finished."""
        reduction, lane = self._reduction, self._reduction.lane
        reduction.check()
        lane.await_each(self._awaited, reduction.fingerprint, spin=False)
        self._round += 1
        if self._round == 2:
            for i in lane.others:
                reduction.codec.unpack(self._spaces[i], self._parts[i])
            return True
        mine = self._parts[lane.position]
        if mine.size:
            reduction.add([mine, *(reduction.unpacked(self._terms[i], mine) for i in lane.others)], last=True)
        self._spaces = {i: reduction.codec.space(self._parts[i]) for i in lane.others}
        self._awaited = [(i, reduction.receive(i, space)) for i, space in self._spaces.items() if space.size]
        reduction.send(_from_the_next(lane), mine)
        for term in self._terms.values():
            reduction.give_back(term)
        self._terms = {}
        return False


class Ring:
    """A chunk that goes round: every part is added to by one member after the other, then handed round once more."""

    def __init__(self, reduction: Reduction, chunk: Array) -> None:
        self._reduction, lane = reduction, reduction.lane
        self._parts = [chunk[cut] for cut in slices(chunk.size, lane.size, chunk.itemsize)]
        self._round = 0
        self._right, self._left = (lane.position + 1) % lane.size, (lane.position - 1) % lane.size
        reduction.send([self._right], self._parts[lane.position])
        self._expect()

    def _incoming(self) -> Array:
        """The part that comes in this round."""
        lane = self._reduction.lane
        return self._parts[(lane.position - 1 - self._round) % lane.size]

    def _expect(self) -> None:
        part, adding = self._incoming(), self._round < self._reduction.lane.size - 1
        self._space = self._reduction.space(part) if adding else self._reduction.codec.space(part)
        self._awaited = [(self._left, self._reduction.receive(self._left, self._space))] if part.size else []

    def advance(self) -> bool:
        """Wait for what this round receives, and start the next; whether the chunk is finished."""
        reduction, lane = self._reduction, self._reduction.lane
        reduction.check()
        lane.await_each(self._awaited, reduction.fingerprint, spin=False)
        part = self._incoming()
        if part.size and self._round < lane.size - 1:
            last = self._round == lane.size - 2
            reduction.add([part, reduction.unpacked(self._space, part)], last)
            reduction.give_back(self._space)
        elif part.size:
            reduction.codec.unpack(self._space, part)
        self._round += 1
        if self._round == 2 * (lane.size - 1):
            return True
        reduction.send([self._right], part)
        self._expect()
        return False


def _from_the_next(lane: NetworkGroup) -> list[int]:
    """The other members, beginning with the next, so that not all begin with the same one."""
    return [(lane.position + step) % lane.size for step in range(1, lane.size)]


Algorithm = type[Pair] | type[Direct] | type[Ring]


def choose_algorithm(members: int, nbytes: int) -> tuple[Algorithm, int]:
    """How chunks of a message of some size go, and in how many rounds."""
    if members == 2 and nbytes <= PAIR_UP_TO:
        return Pair, 1
    return (Direct, 2) if members < RING_FROM else (Ring, 2 * (members - 1))


class Pipeline:
    """The chunks of one operation under way, oldest first."""

    def __init__(self, reduction: Reduction, choose_algorithm: Algorithm) -> None:
        self._reduction, self._way = reduction, choose_algorithm
        self._chunks: deque[Pair | Direct | Ring] = deque()

    def step(self, chunk: Array | None) -> None:
        """Begin a chunk, reduced in place, and take all older ones a round further.

        It is finished as many steps later as its way has rounds.
        """
        older = list(self._chunks)
        if chunk is not None:
            self._chunks.append(self._way(self._reduction, chunk))
        for one in older:
            if one.advance():
                self._chunks.popleft()
        self._reduction.start_sending()

    def end(self) -> None:
        """Wait until all has been sent, after which the memory may change."""
        self._reduction.finish()
