"""Collectives among ranks on different hosts, over a plane that moves bytes between pairs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_into
from ring_plugins.core.arrays.codec import Codec, IdentityCodec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import MismatchError, RingError
from ring_plugins.core.base.types import Array, Bytes
from ring_plugins.core.collectives.fingerprint import Fingerprint, fingerprint, mismatch
from ring_plugins.core.collectives.shm_group import slices
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.net.transport import Request, Transport

_HEADER = 192
#: Up to this size everyone sends everything to everyone: one round instead of two.
SMALL = 16 * 1024


class NetworkGroup:
    """A `Transport` over a `Plane`.

    Args:
        plane: carries the bytes.
        ranks: world ranks of the members.
        position: which of them this process is.
        tag: not used by any other lane of these ranks.
        wait: how to wait.
        name: of the communicator.
    """

    def __init__(
        self, transport: Transport, ranks: Sequence[int], position: int, tag: int, wait: Wait, name: str
    ) -> None:
        self.position, self.size, self.name = position, len(ranks), name
        self.ranks = tuple(ranks)
        self.others = [i for i in range(len(ranks)) if i != position]
        self._transport = transport
        self._tag = tag
        self._wait = wait
        #: Memory for what is received to be added, used again and again.
        self.spare: list[Bytes] = []

    def connect(self) -> None:
        """Find out now, and not in the middle of training, whether the members reach each other; all call it."""
        others = [self.ranks[i] for i in self.others]
        self._finish(self._transport.connect(others, self._tag), lambda: others, fingerprint("connect"))

    def __del__(self) -> None:
        self._transport.disconnect(self._tag)

    # Moving bytes ---------------------------------------------------------------------------------

    def send(self, member: int, data: Bytes) -> Request:
        return self._transport.exchange([(self.ranks[member], data)], [], self._tag)

    def receive(self, member: int, data: Bytes) -> Request:
        return self._transport.exchange([], [(self.ranks[member], data)], self._tag)

    def swap(self, member: int, outgoing: Bytes, incoming: Bytes) -> Request:
        rank = self.ranks[member]
        return self._transport.exchange([(rank, outgoing)], [(rank, incoming)], self._tag)

    def progress(self) -> None:
        """Move what can be moved, for a member that waits for something else; who waits for what fails is told."""
        with contextlib.suppress(RingError):
            self._transport.progress(self._tag)

    def await_each(self, pending: Sequence[tuple[int, Request]], fingerprint: Fingerprint, spin: bool = True) -> None:
        """Wait for transfers with one member each: one that is through may leave while others are awaited."""
        left = list(pending)
        while left:
            first = left[0][1]
            if not first.done():
                self._finish(
                    first,
                    lambda: [self.ranks[i] for i, transfer in left if not transfer.done()],
                    fingerprint,
                    spin=spin,
                )
            del left[0]

    def _finish(
        self,
        pending: Request,
        missing: Callable[[], Sequence[int]],
        fingerprint: Fingerprint,
        arrival: bool = False,
        spin: bool = True,
    ) -> None:
        self._wait.until(
            pending.done,
            missing,
            lambda: f"{self.name}: {fingerprint.text} between hosts",
            arrival,
            pending.nap,
            spin=spin,
        )

    def announce(self, sizes: Sequence[int], expected: Sequence[int], fingerprint: Fingerprint) -> Announcement:
        """Begin an operation: tell everyone which it is and how much is coming.

        The data may be sent right after, and memory for it given at once; before what came is used, `check` it.

        Args:
            sizes: bytes that each member will be sent, 0 for the own.
            expected: bytes that each is to send.
            signature: of the operation.
        """
        return Announcement(self, sizes, expected, fingerprint)

    def _swap(
        self, outgoing: Sequence[Bytes | None], incoming: Sequence[Bytes | None], fingerprint: Fingerprint
    ) -> None:
        """Send `outgoing[i]` to member i and fill `incoming[i]` from it, None for nothing."""
        said = self.announce(_sizes(outgoing), _sizes(incoming), fingerprint)
        moving = [
            (i, self._transport.exchange(_to(self.ranks[i], outgoing[i]), _to(self.ranks[i], incoming[i]), self._tag))
            for i in self.others
        ]
        said.check()
        self.await_each(moving, fingerprint)
        own_out, own_in = outgoing[self.position], incoming[self.position]
        if own_out is not None and own_in is not None and own_out is not own_in:
            own_in[:] = own_out

    # Transport ------------------------------------------------------------------------------------

    def barrier(self, fingerprint: Fingerprint) -> None:
        nothing: list[Bytes | None] = [None] * self.size
        self._swap(nothing, nothing, fingerprint)

    def all_gather(self, mine: Bytes, parts: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        self._swap([mine] * self.size, parts, fingerprint)

    def all_to_all(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        self._swap(outgoing, incoming, fingerprint)

    def broadcast(self, data: Bytes, root: int, fingerprint: Fingerprint) -> None:
        """The root sends everyone one part of its own, then everyone sends theirs to all but the root.

        Nobody sends more than about the whole once, the root neither.
        """
        at_root, from_root = self.position == root, [i == root for i in range(self.size)]
        if data.size <= SMALL:
            outgoing: list[Bytes | None] = [data if at_root else None] * self.size
            incoming: list[Bytes | None] = [data if source and not at_root else None for source in from_root]
            self._swap(outgoing, incoming, fingerprint)
            return
        parts = [data[cut] for cut in slices(data.size, self.size, 1)]
        mine = parts[self.position]
        self._swap(
            [part if at_root else None for part in parts],
            [mine if source and not at_root else None for source in from_root],
            fingerprint,
        )
        self._swap(
            [None if target else mine for target in from_root],
            [None if at_root else part for part in parts],
            fingerprint,
        )

    def all_reduce_small(
        self, array: Array, op: Op, dtype: str, divisor: float, fingerprint: Fingerprint, codec: Codec | None = None
    ) -> None:
        """Everyone sends everything to everyone and reduces it in the same order, so that all get the same bits."""
        codec = codec or IdentityCodec()
        everyones = np.empty((self.size, array.size), array.dtype)
        received = [codec.space(row) for row in everyones]
        self.all_gather(codec.pack(array).view(np.uint8), [one.view(np.uint8) for one in received], fingerprint)
        for one, row in zip(received, everyones, strict=True):
            codec.unpack(one, row)
        reduce_into(array, list(everyones), op, dtype, divisor)


class Announcement:
    """What every member says ahead of its data: which operation, and how many bytes."""

    def __init__(
        self, lane: NetworkGroup, sizes: Sequence[int], expected: Sequence[int], fingerprint: Fingerprint
    ) -> None:
        self._lane, self._fingerprint, self._expected = lane, fingerprint, expected
        self._theirs = np.zeros((lane.size, _HEADER), np.uint8)
        ranks, others = lane.ranks, lane.others
        self._transfers = lane._transport.exchange(
            [(ranks[i], _head(fingerprint, sizes[i])) for i in others],
            [(ranks[i], self._theirs[i]) for i in others],
            lane._tag,
        )

    def check(self) -> None:
        """Wait for everyone's, and compare.

        Raises:
            MismatchError: members are in different operations, or disagree about sizes.
        """
        lane, theirs, ranks = self._lane, self._theirs, self._lane.ranks
        lane._finish(
            self._transfers,
            lambda: [ranks[i] for i in lane.others if not theirs[i].any()],
            self._fingerprint,
            arrival=True,
        )
        said = memoryview(theirs.reshape(-1)).cast("q")
        code, step = self._fingerprint.code, _HEADER // 8
        if any(said[i * step] != code for i in lane.others):
            theirs[lane.position] = _head(self._fingerprint, 0)
            calls = {r: bytes(theirs[i, 16:]).rstrip(b"\0").decode(errors="replace") for i, r in enumerate(ranks)}
            raise mismatch(lane.name, calls)
        for i in lane.others:
            if (size := said[i * step + 1]) != self._expected[i]:
                raise MismatchError(
                    f"ranks disagree in {lane.name}: {self._fingerprint.text}: rank {ranks[i]} sends {size} bytes "
                    f"to rank {ranks[lane.position]}, which expects {self._expected[i]}. Sizes must agree."
                )


@lru_cache(maxsize=256)
def _head(fingerprint: Fingerprint, nbytes: int) -> Bytes:
    """What goes ahead of `nbytes` of data; the same array for the same, which nobody writes to."""
    head = np.zeros(_HEADER, np.uint8)
    head[:16].view(np.int64)[:] = fingerprint.code, nbytes
    said = fingerprint.text.encode()[: _HEADER - 16]
    head[16 : 16 + len(said)] = np.frombuffer(said, np.uint8)
    return head


def _to(rank: int, part: Bytes | None) -> list[tuple[int, Bytes]]:
    return [] if part is None or not part.size else [(rank, part)]


def _sizes(parts: Sequence[Bytes | None]) -> list[int]:
    return [0 if part is None else part.size for part in parts]
