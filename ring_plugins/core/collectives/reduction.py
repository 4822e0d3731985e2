"""What is computed with the chunks of one all-reduce between hosts, and the memory and messages that takes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ring_plugins.core.arithmetic import reduce_into
from ring_plugins.core.collectives.lane import Announcement, Lane
from ring_plugins.core.collectives.signature import Signature
from ring_plugins.core.collectives.wire import Wire
from ring_plugins.core.errors import PeerFailed
from ring_plugins.core.operations import Op
from ring_plugins.core.plane import Pending

Array = np.ndarray[Any, np.dtype[Any]]


class Reduction:
    """What to compute with the chunks of one operation.

    Args:
        lane: the members.
        op, dtype: as in `reduce_into`.
        divisor: the result is divided by this.
        wire: how numbers travel.
        signature: of the operation.
    """

    def __init__(self, lane: Lane, op: Op, dtype: str, divisor: float, wire: Wire, signature: Signature) -> None:
        self.lane, self.op, self.dtype, self.divisor = lane, op, dtype, divisor
        self.wire, self.signature = wire, signature
        self._announcement: Announcement | None = None
        self.unsent: list[tuple[int, Pending]] = []

    def announce(self, nbytes: int) -> None:
        """Tell the others what this is; once, before the first chunk."""
        sizes = [nbytes] * self.lane.size
        self._announcement = self.lane.announce(sizes, sizes, self.signature)

    def check(self) -> None:
        """Before the first use of what others sent: are they in the same operation?"""
        if self._announcement is not None:
            self._announcement.check()
            self._announcement = None

    def send(self, members: Sequence[int], piece: Array) -> None:
        if piece.size:
            data = self.wire.pack(piece).view(np.uint8)
            self.unsent += [(member, self.lane.send(member, data)) for member in members]

    def receive(self, member: int, space: Array) -> Pending:
        return self.lane.receive(member, space.view(np.uint8))

    def space(self, piece: Array) -> Array:
        """Where to receive a term of a sum; to be given back."""
        if not self.wire.exact:
            return self.wire.space(piece)
        memory = self.lane.spare.pop() if self.lane.spare else None
        if memory is None or memory.size < piece.nbytes:
            memory = np.empty(piece.nbytes, np.uint8)
        return memory[: piece.nbytes].view(piece.dtype)

    def give_back(self, memory: Array) -> None:
        """For the next chunk, or operation: fresh memory from the kernel would cost as much as receiving into it."""
        if self.wire.exact:
            while isinstance(memory.base, np.ndarray):
                memory = memory.base
            self.lane.spare.append(memory)

    def finish(self) -> None:
        """Wait until all is sent, after which the memory may change."""
        self.lane.await_each(self.unsent, self.signature, spin=False)
        self.unsent = []

    def start_sending(self) -> None:
        """Let go what can, and keep no record of what has left."""
        with contextlib.suppress(PeerFailed):  # whoever waits is told, and why
            while self.unsent and self.unsent[0][1].done():
                del self.unsent[0]

    def unpacked(self, received: Array, piece: Array) -> Array:
        """What was received for a piece, as numbers."""
        if self.wire.exact:
            return received
        term = np.empty_like(piece)
        self.wire.unpack(received, term)
        return term

    def add(self, terms: Sequence[Array], last: bool) -> None:
        """Leave the sum of all in the first; after the last addition, what all will have: divided, and rounded."""
        first = terms[0]
        reduce_into(first, terms, self.op, self.dtype, self.divisor if last else 1)
        if last and not self.wire.exact:
            self.wire.unpack(self.wire.pack(first), first)
