"""Collectives among ranks on different hosts, over a plane that moves bytes between pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ring_plugins.core.arithmetic import reduce_into
from ring_plugins.core.collectives.node import slices
from ring_plugins.core.collectives.signature import Signature, mismatch
from ring_plugins.core.errors import MismatchError
from ring_plugins.core.operations import Op
from ring_plugins.core.plane import Bytes, Pending, Plane
from ring_plugins.core.waiting import Wait

Array = np.ndarray[Any, np.dtype[Any]]

_HEADER = 192
#: Up to this size everyone sends everything to everyone: one round instead of two.
SMALL = 16 * 1024


class Lane:
    """A `Transport` over a `Plane`.

    Args:
        plane: carries the bytes.
        ranks: world ranks of the members.
        position: which of them this process is.
        tag: not used by any other lane of these ranks.
        wait: how to wait.
        name: of the communicator.
    """

    def __init__(self, plane: Plane, ranks: Sequence[int], position: int, tag: int, wait: Wait, name: str) -> None:
        self.position, self.size, self.name = position, len(ranks), name
        self._plane = plane
        self._ranks = tuple(ranks)
        self._others = [i for i in range(len(ranks)) if i != position]
        self._tag = tag
        self._wait = wait

    def _finish(
        self, pending: Pending, missing: Callable[[], Sequence[int]], signature: Signature, arrival: bool = False
    ) -> None:
        self._wait.until(pending.done, missing, lambda: f"{self.name}: {signature.text} between hosts", arrival)

    def _finish_each(self, pending: Sequence[tuple[int, Pending]], signature: Signature) -> None:
        """Wait for transfers with one world rank each: one that is through may leave while others are awaited."""
        left = list(pending)
        while left:
            self._finish(left[0][1], lambda: [rank for rank, transfer in left if not transfer.done()], signature)
            del left[0]

    def _swap(
        self,
        outgoing: Sequence[Bytes | None],
        incoming: Sequence[Bytes | None],
        signature: Signature,
        first: bool = True,
    ) -> None:
        """Send `outgoing[i]` to member i and fill `incoming[i]` from it, None for nothing; `first` in its operation.

        Ahead of the data goes a header that says which operation this is and how much is coming. Data is
        received only after the header was found right: members in different operations find out, and no
        message ever meets memory of another size, for which gloo would end the process.
        """
        ranks, others = self._ranks, self._others
        heads = np.zeros((self.size, _HEADER), np.uint8)
        said = signature.text.encode()[: _HEADER - 16]
        heads[:, 16 : 16 + len(said)] = np.frombuffer(said, np.uint8)
        words = heads[:, :16].view(np.int64)
        words[:, 0] = signature.code
        words[:, 1] = [0 if part is None else part.size for part in outgoing]
        theirs = heads.copy()
        theirs[others] = 0
        headers = self._plane.exchange(
            [(ranks[i], heads[i]) for i in others], [(ranks[i], theirs[i]) for i in others], self._tag
        )
        parts = [(ranks[i], part) for i in others if (part := outgoing[i]) is not None and part.size]
        sent = [(rank, self._plane.exchange([(rank, part)], [], self._tag)) for rank, part in parts]
        self._finish(headers, lambda: [ranks[i] for i in others if not theirs[i].any()], signature, first)
        codes, sizes = theirs[:, :16].view(np.int64).T
        if (codes != signature.code).any():
            calls = {r: bytes(theirs[i, 16:]).rstrip(b"\0").decode(errors="replace") for i, r in enumerate(ranks)}
            raise mismatch(self.name, calls)
        for i in others:
            part = incoming[i]
            if sizes[i] != (0 if part is None else part.size):
                raise MismatchError(
                    f"ranks disagree in {self.name}: {signature.text}: rank {ranks[i]} sends {sizes[i]} bytes to rank "
                    f"{ranks[self.position]}, which expects {0 if part is None else part.size}. Sizes must agree."
                )
        parts = [(ranks[i], part) for i in others if (part := incoming[i]) is not None and part.size]
        received = [(rank, self._plane.exchange([], [(rank, part)], self._tag)) for rank, part in parts]
        self._finish_each([*received, *sent], signature)
        own_out, own_in = outgoing[self.position], incoming[self.position]
        if own_out is not None and own_in is not None and own_out is not own_in:
            own_in[:] = own_out

    def barrier(self, signature: Signature) -> None:
        nothing: list[Bytes | None] = [None] * self.size
        self._swap(nothing, nothing, signature)

    def all_gather(self, mine: Bytes, parts: Sequence[Bytes], signature: Signature) -> None:
        self._swap([mine] * self.size, parts, signature)

    def all_to_all(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes], signature: Signature) -> None:
        self._swap(outgoing, incoming, signature)

    def broadcast(self, data: Bytes, root: int, signature: Signature) -> None:
        """The root sends everyone one part of its own, then everyone sends theirs to all but the root.

        Nobody sends more than about the whole once, the root neither.
        """
        at_root, from_root = self.position == root, [i == root for i in range(self.size)]
        if data.size <= SMALL:
            outgoing: list[Bytes | None] = [data if at_root else None] * self.size
            incoming: list[Bytes | None] = [data if source and not at_root else None for source in from_root]
            self._swap(outgoing, incoming, signature)
            return
        parts = [data[cut] for cut in slices(data.size, self.size, 1)]
        mine = parts[self.position]
        self._swap(
            [part if at_root else None for part in parts],
            [mine if source and not at_root else None for source in from_root],
            signature,
        )
        self._swap(
            [None if target else mine for target in from_root],
            [None if at_root else part for part in parts],
            signature,
            first=False,
        )

    def all_reduce(self, array: Array, op: Op, dtype: str, signature: Signature) -> None:
        """Reduce in place. Each part is combined by one member only, so all get the same bits."""
        if array.nbytes <= SMALL:
            everyones = np.empty((self.size, array.size), array.dtype)
            self.all_gather(array.view(np.uint8), [row.view(np.uint8) for row in everyones], signature)
            reduce_into(array, list(everyones), op, dtype)
            return
        parts = [array[cut] for cut in slices(array.size, self.size, array.itemsize)]
        mine = parts[self.position]
        terms = [mine if i == self.position else np.empty_like(mine) for i in range(self.size)]
        self._swap([part.view(np.uint8) for part in parts], [term.view(np.uint8) for term in terms], signature)
        reduce_into(mine, [mine, *(terms[i] for i in self._others)], op, dtype)
        outgoing: list[Bytes | None] = [mine.view(np.uint8)] * self.size
        self._swap(outgoing, [part.view(np.uint8) for part in parts], signature, first=False)
