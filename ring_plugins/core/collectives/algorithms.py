"""All-reduce between hosts: algorithms for one chunk of an array.

**Rounds.** An algorithm is a generator. Its first `next` starts the first round of a chunk, each further one waits for
the data of a round and starts the next, and the chunk is finished with the generator. So the pipeline of `hierarchical`
can keep several chunks in different rounds: the network moves some while the processor reduces others. All members take
the same steps in the same order, so their messages match without being numbered.

**Algorithms.** With all of them each host sends 2(n-1)/n times the data, which is the minimum (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). They differ in rounds and connections:

- `pair_exchange`: two members send each other everything, and both reduce it. One round.
- `butterfly`: a chunk is cut into one part per member of a small group. Each member reduces its part with the others of
  its group, then a part of that part with a second group, and so on: a reduce-scatter. Then the results return the same
  way: an all-gather. Up to seven members form a single group, which takes two rounds in all.
- `ring`: members talk only to their two neighbors. Parts are passed around and added to for n-1 rounds, and the results
  are passed around for n-1 more. This is the ring of NCCL and Horovod (Baidu, 2017).
- `reduce_small`, for small messages: the groups of the butterfly exchange everything, without cutting it.

**Groups of a butterfly.** The position of a member is written as a number of several digits, each with a radix of its
own. In round d a member exchanges with the members whose positions differ from its own in digit d only. After as many
rounds as there are digits, everyone's numbers have reached everyone. A single digit is a direct exchange among all
members; digits of radix 2 are recursive halving and doubling (Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005). For radices in between see Ruefenacht, Bull and Booth,
"Generalisation of recursive doubling for AllReduce", 2017. The first digit has the largest radix and tells adjacent
members apart. So most of the data moves between hosts that a scheduler has numbered one after the other, which often
hang at the same switch, and little crosses the network's core.

The butterfly takes a few rounds where the ring takes hundreds, at the same number of bytes. It would need large groups
if the number of members had a large prime factor, and a switch drops packets when many hosts send to one at the same
time (incast). There the ring is used. NCCL's double binary trees were rejected: they take as many rounds as the
butterfly, for messages too large for one round, and need more code.

Where a codec rounds numbers to 16 bits, the member that computed a result rounds its own copy too, so that all members
end up with the same bits.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_into
from ring_plugins.core.arrays.codec import Codec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import slices
from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.types import Array, Bytes
from ring_plugins.core.collectives.fingerprint import Fingerprint
from ring_plugins.core.collectives.net_group import NetworkGroup, PendingHeaders
from ring_plugins.core.net.transport import Request

#: Largest group of a butterfly; where it would need a larger one, the ring is used.
LARGEST_GROUP = 32
#: Up to this size two hosts exchange everything in one round, which takes less processor time. Larger messages gain
#: more from two rounds: their pieces are shorter and stay in the caches, and one round's data moves while the other
#: waits.
PAIR_EXCHANGE_BYTES = 2 * 1024 * 1024
#: Messages that are kept before a look at which of them have been sent, since each look is a few system calls.
_UNSENT = 8
#: How many messages could be handled in the time that a round waits for its data to arrive. Measured between two test
#: hosts (benchmarks/many_hosts.py): a message takes 32 us of Python and system calls at its two ends, and a round 5 us
#: more. The switches of a data center add 20 to 60 us to a round.
_MESSAGES_PER_ROUND = 2


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
        if len(self._unsent) > _UNSENT:
            with contextlib.suppress(PeerFailed):  # the next wait raises it, with the reason
                while self._unsent and self._unsent[0].done():
                    self._unsent.popleft()

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
        self.codec.unpack(received, piece, into=term)
        return term

    def combine(self, target: Array, terms: Sequence[Array], is_result: bool = True, rounded: bool = True) -> None:
        """Reduce `terms` into `target`, which may be one of them.

        Args:
            target, terms: as in `reduce_into`.
            is_result: whether these are the last terms, so that the result is to be divided.
            rounded: whether to round a result as the codec rounds the copies for other members.
        """
        reduce_into(target, terms, self._op, self._dtype, self._divisor if is_result else 1)
        if is_result and rounded:
            self.codec.round(target)


#: Reduces a chunk, in place: each `next` ends a round and starts another one.
Algorithm = Callable[[Reduction, Array], Iterator[None]]


def pair_exchange(reduction: Reduction, chunk: Array) -> Iterator[None]:
    """Two members send each other the whole chunk, and both reduce it: one round."""
    group, codec = reduction.group, reduction.codec
    packed, term = codec.pack(chunk), reduction.take_term(chunk)
    (peer,) = group.others
    reduction.introduce(0, [peer])
    pending = group.exchange([(peer, packed.view(np.uint8))], [(peer, term.view(np.uint8))])
    yield
    reduction.wait(0, pending)  # for the send too, since the sum overwrites what is sent
    if chunk.size:
        mine = chunk if codec.exact else reduction.unpacked(packed, chunk)
        theirs = reduction.unpacked(term, chunk)
        # Both members add rounded numbers in member order, so they get the same bits.
        reduction.combine(chunk, [mine, theirs] if peer else [theirs, mine], rounded=False)
    reduction.return_term(term)


def butterfly(reduction: Reduction, chunk: Array) -> Iterator[None]:
    """Groups of members reduce and scatter the chunk, round by round, and then gather in the opposite order."""
    position, codec = reduction.group.position, reduction.codec
    groups, piece, levels = rounds(reduction.group.size, position), chunk, []
    for number, group in enumerate(groups):
        parts = [piece[cut] for cut in slices(piece.size, len(group), piece.itemsize)]
        me = group.index(position)
        others = [(me + step) % len(group) for step in range(1, len(group))]  # so that not all send to one first
        levels.append((group, parts, me, others))
        piece = parts[me]
        reduction.introduce(number, [group[i] for i in others])
        terms = [reduction.take_term(piece) for _ in others]
        pending = reduction.receive([(group[i], term) for i, term in zip(others, terms, strict=True)])
        reduction.send([([group[i]], parts[i]) for i in others])
        yield
        reduction.wait(number, pending)
        if piece.size:
            received = [reduction.unpacked(term, piece) for term in terms]
            reduction.combine(piece, [piece, *received], is_result=number == len(groups) - 1)
        for term in terms:
            reduction.return_term(term)
    for number, (group, parts, me, others) in enumerate(reversed(levels), len(groups)):
        buffers = {i: codec.receive_buffer(parts[i]) for i in others}
        pending = reduction.receive([(group[i], buffer) for i, buffer in buffers.items()])
        reduction.send([([group[i] for i in others], parts[me])])
        yield
        reduction.wait(number, pending)
        for i, buffer in buffers.items():
            codec.unpack(buffer, parts[i])


def ring(reduction: Reduction, chunk: Array) -> Iterator[None]:
    """Parts of the chunk are passed around the members twice: once to be added to, once as results."""
    position, size, codec = reduction.group.position, reduction.group.size, reduction.codec
    parts = [chunk[cut] for cut in slices(chunk.size, size, chunk.itemsize)]
    last_sum, part = size - 2, parts[position]
    reduction.introduce(0, reduction.group.others)
    for number in range(2 * (size - 1)):
        reduction.send([([(position + 1) % size], part)])
        part = parts[(position - 1 - number) % size]
        is_term = number <= last_sum
        buffer = reduction.take_term(part) if is_term else codec.receive_buffer(part)
        pending = reduction.receive([((position - 1) % size, buffer)])
        yield
        reduction.wait(number, pending)
        if part.size and is_term:
            reduction.combine(part, [part, reduction.unpacked(buffer, part)], is_result=number == last_sum)
            reduction.return_term(buffer)
        elif part.size:
            codec.unpack(buffer, part)


def choose_algorithm(members: int, nbytes: int) -> tuple[Algorithm, int]:
    """Choose the algorithm for a message of `nbytes`; return it and its number of rounds."""
    if members == 2 and nbytes <= PAIR_EXCHANGE_BYTES:
        return pair_exchange, 1
    split = radices(members)
    return (butterfly, 2 * len(split)) if split[0] <= LARGEST_GROUP else (ring, 2 * (members - 1))


def reduce_small(
    group: NetworkGroup, array: Array, op: Op, dtype: str, divisor: float, codec: Codec, fingerprint: Fingerprint
) -> None:
    """Combine the `array` of all members; all get the same bits.

    Few members send their arrays to all others, and all reduce in member order: one round. Of many, groups do the same
    one after the other, each with the sums of the round before.

    Args:
        group: the members.
        array: 1-d storage array, the same length everywhere.
        op, dtype, divisor: as in `reduce_into`.
        codec: encodes what is sent.
        fingerprint: of the operation.
    """
    left, holders = group.size, 1
    for members in rounds(group.size, group.position):
        left //= len(members)
        terms = np.empty((len(members), array.size), array.dtype)
        received = list(terms) if codec.exact else [codec.receive_buffer(array) for _ in terms]
        packed = codec.pack(array, holders).view(np.uint8)
        outgoing: list[Bytes | None] = [None] * group.size
        incoming: list[Bytes | None] = [None] * group.size
        for i, term in zip(members, received, strict=True):
            outgoing[i], incoming[i] = packed, term.view(np.uint8)
        group.exchange_all(outgoing, incoming, fingerprint, members=[i for i in members if i != group.position])
        for data, term in zip(received, terms, strict=True):
            if not codec.exact:
                codec.unpack(data, array, into=term)
        reduce_into(array, list(terms), op, dtype, divisor if left == 1 else 1)
        holders *= len(members)


@lru_cache(maxsize=256)
def radices(members: int) -> tuple[int, ...]:
    """The radices, largest first, with which a message that is passed on in every round arrives soonest.

    Their product is the number of members, so a prime number has a single one.
    """
    best: tuple[int, ...] = (members,)
    for radix in range(2, math.isqrt(members) + 1):
        if members % radix == 0:
            split = tuple(sorted((radix, *radices(members // radix)), reverse=True))
            best = min(best, split, key=cost)  # of equal ones, the one with fewer rounds
    return best


def cost(split: tuple[int, ...]) -> int:
    """The time of all rounds with these radices, as a number of messages that could be handled in it."""
    return sum(_MESSAGES_PER_ROUND + radix - 1 for radix in split)


def rounds(members: int, position: int) -> list[list[int]]:
    """By round, the positions that exchange with each other, this member's included, in the order of their digits."""
    stride, found = 1, []
    for radix in radices(members):
        first = position - position // stride % radix * stride
        found.append([first + digit * stride for digit in range(radix)])
        stride *= radix
    return found
