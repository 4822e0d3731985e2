"""Collectives among ranks on different hosts, over a transport that moves bytes between pairs of ranks.

Every operation begins with a header from each member to every other: the operation's fingerprint and the numbers of
bytes that each of the two sends to the other. Headers and data leave together, without a round trip between them, and
nobody uses received data before the headers have been compared. So ranks that are in different operations get a
`MismatchError` instead of wrong numbers or a hang, at the cost of 512 bytes per pair. A member that finds a mismatch
which others cannot see sends them its error instead of its next header.

Data goes directly between members, in one round. Only a large broadcast takes two (scatter, then all-gather: van de
Geijn, "On global combine operations", 1994), so that the root sends the data about once instead of n-1 times.
`algorithms` adds all-reduces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ring_plugins.core.arrays.memory import slices
from ring_plugins.core.base.errors import MismatchError, PeerFailed, RingError
from ring_plugins.core.base.places import place_of_call
from ring_plugins.core.base.types import Array, Bytes
from ring_plugins.core.collectives.api import ByteCollectives
from ring_plugins.core.collectives.fingerprint import Fingerprint, fingerprint, mismatch, size_mismatch
from ring_plugins.core.control.wait import SPIN, Wait
from ring_plugins.core.net.transport import Request, Transport

#: Bytes of a header: the fingerprint's code, the bytes sent and expected, the fingerprint's text.
_HEADER_BYTES = 512
_HEADER_TEXT = 24
#: Instead of a fingerprint's code, in a header whose text is an error.
_REPORT = -1
#: Up to this size everyone sends everything to everyone: one round instead of two.
SMALL_BYTES = 16 * 1024


class PendingHeaders(NamedTuple):
    """Headers under way; see `NetworkGroup.send_headers`."""

    request: Request
    received: Array
    members: Sequence[int]
    sizes: Sequence[int]
    expected: Sequence[int]
    fingerprint: Fingerprint


class NetworkGroup(ByteCollectives):
    """Ranks that exchange bytes over a transport; implements `ByteCollectives`.

    Args:
        transport: moves the bytes.
        ranks: world ranks of the members.
        position: which of them this process is.
        tag: not used by any other group of these ranks.
        wait: long waits go through it.
        name: of the communicator.
        behind: by member, the world ranks that make the same calls, for error texts; by default only the member.
        interrupt: called while this member waits; raises if the operation cannot succeed any more.

    Attributes:
        size, position: of the group, and of this process in it.
        ranks, name: as given.
        others: positions of the other members.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        position: int,
        tag: int,
        wait: Wait,
        name: str,
        behind: Sequence[Sequence[int]] | None = None,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        self.position, self.size = position, len(ranks)
        self.others = [i for i in range(len(ranks)) if i != position]
        self._transport, self.ranks, self._tag, self._wait, self.name = transport, tuple(ranks), tag, wait, name
        self._behind = behind or [[rank] for rank in ranks]
        self._interrupt = interrupt
        self._all_know_of_mismatch = False
        self._spare_buffers: list[Bytes] = []

    def connect(self) -> None:
        """Connect now, so that an unreachable member is found before training begins; collective."""
        request = self._transport.connect([self.ranks[i] for i in self.others], self._tag)
        self._wait_for(request, request.missing, fingerprint("connect"))

    def close(self) -> None:
        """Close the connections, which nobody uses any more."""
        self._transport.disconnect(self._tag)

    def abandon(self) -> None:
        """Close the connections in the middle of an operation, without waiting for the other members."""
        self._transport.abandon(self._tag)

    __del__ = close  # where nobody has called it; a signal handler's exception would be lost there

    # Transfers ------------------------------------------------------------------------------------

    def exchange(self, outgoing: Sequence[tuple[int, Bytes]], incoming: Sequence[tuple[int, Bytes]]) -> Request:
        """Start to send to members and to receive from them; (member, data) each, as in `Transport.exchange`."""
        ranks = self.ranks
        self._wait.begun = True
        return self._transport.exchange(
            [(ranks[member], data) for member, data in outgoing],
            [(ranks[member], data) for member, data in incoming],
            self._tag,
        )

    def exchange_parts(self, outgoing: Sequence[Bytes | None], incoming: Sequence[Bytes | None]) -> Request:
        """Start to send `outgoing[i]` to member i and to fill `incoming[i]` from it.

        The next member comes first, so that not all send to the same member at once. This member's own are ignored.
        """
        members = [(self.position + step) % self.size for step in range(1, self.size)]
        return self.exchange(
            [(i, data) for i in members if (data := outgoing[i]) is not None],
            [(i, data) for i in members if (data := incoming[i]) is not None],
        )

    def progress(self) -> None:
        """Advance pending transfers while this member waits for something else; their own wait raises errors."""
        with contextlib.suppress(RingError):
            self._transport.progress(self._tag)

    def wait(self, requests: Sequence[Request], fingerprint: Fingerprint, spin: bool = True) -> None:
        """Wait for transfers; a member may disconnect as soon as those with itself are done."""
        left = list(requests)
        while left:
            try:
                finished = left[0].done()
            except PeerFailed:  # the wait raises it again, with the peer's reason
                finished = False
            if not finished:
                self._wait_for(
                    left[0],
                    lambda: [rank for request in left if not request.done() for rank in request.missing()],
                    fingerprint,
                    spin=spin,
                )
            del left[0]

    def _wait_for(
        self,
        request: Request,
        missing: Callable[[], Sequence[int]],
        fingerprint: Fingerprint,
        arrival: bool = False,
        spin: bool = True,
    ) -> None:
        def ready() -> bool:
            if self._interrupt is not None:
                self._interrupt()
            return request.done()

        self._wait.until(
            ready,
            missing,
            lambda: f"{self.name}: {fingerprint.text} between hosts",
            arrival,
            request.nap,
            spin=SPIN if spin else 0.0,
            receiving=lambda rank: self._transport.is_receiving(rank, self._tag),
        )

    def take_buffer(self, nbytes: int) -> Bytes:
        """Return a receive buffer, reused since fresh memory from the kernel costs as much as receiving into it."""
        buffer = self._spare_buffers.pop() if self._spare_buffers else None
        if buffer is None or buffer.size < nbytes:
            buffer = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]

    def return_buffer(self, memory: Array) -> None:
        """Keep memory from `take_buffer`, or a view of it, for the next chunk or operation."""
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        self._spare_buffers.append(memory)

    # Headers --------------------------------------------------------------------------------------

    def send_headers(
        self,
        sizes: Sequence[int],
        expected: Sequence[int],
        fingerprint: Fingerprint,
        members: Sequence[int] | None = None,
    ) -> PendingHeaders:
        """Begin an operation: tell other members which operation this is and how many bytes they will be sent.

        Sends and receives of the data may start right after. Call `check_headers` before received data is used.

        Args:
            sizes: bytes that this member sends to each member; its own entry is ignored.
            expected: bytes that this member expects from each member.
            fingerprint: of the operation.
            members: who exchanges headers with this member; by default all others.
        """
        ranks, members = self.ranks, self.others if members is None else members
        received = np.zeros((self.size, _HEADER_BYTES), np.uint8)
        self._wait.begun = True
        request = self._transport.exchange(
            [(ranks[i], _header(fingerprint, sizes[i], expected[i])) for i in members],
            [(ranks[i], received[i]) for i in members],
            self._tag,
        )
        return PendingHeaders(request, received, members, sizes, expected, fingerprint)

    def check_headers(self, pending: PendingHeaders) -> None:
        """Wait for the headers, and compare.

        Raises:
            MismatchError: members are in different operations, or disagree about sizes, or one has sent an error.
        """
        request, received, members, sizes, expected, fingerprint = pending
        ranks = self.ranks
        self._wait_for(request, lambda: [ranks[i] for i in members if not received[i].any()], fingerprint, arrival=True)
        words, step = memoryview(received.reshape(-1)).cast("q"), _HEADER_BYTES // 8
        if any(words[i * step] != fingerprint.code for i in members):
            self._all_know_of_mismatch = len(members) == len(self.others)
            received[self.position] = _header(fingerprint, 0, 0)
            texts = {
                i: bytes(received[i, _HEADER_TEXT:]).rstrip(b"\0").decode(errors="replace")
                for i in sorted((self.position, *members))
            }
            for i in members:
                if words[i * step] == _REPORT:
                    raise MismatchError(texts[i])
            calls = {rank: text for i, text in texts.items() for rank in self._behind[i]}
            raise mismatch(self.name, calls, place_of_call())
        own = ranks[self.position]
        for i in members:
            theirs, awaited = words[i * step + 1], words[i * step + 2]
            if theirs != expected[i]:
                raise size_mismatch(self.name, fingerprint, ranks[i], theirs, own, expected[i])
            if awaited != sizes[i]:
                raise size_mismatch(self.name, fingerprint, own, sizes[i], ranks[i], awaited)

    def report_mismatch(self, error: MismatchError) -> None:
        """Send `error` to the other members, unless they know: those that wait for this member's header raise it."""
        if self._all_know_of_mismatch:
            return
        self._all_know_of_mismatch = True
        self._wait.begun = True
        header = _header(Fingerprint(_REPORT, str(error)), 0, 0)
        with contextlib.suppress(RingError):
            self._transport.exchange([(self.ranks[i], header) for i in self.others], [], self._tag).done()

    # Collectives ----------------------------------------------------------------------------------

    def exchange_all(
        self,
        outgoing: Sequence[Bytes | None],
        incoming: Sequence[Bytes | None],
        fingerprint: Fingerprint,
        confirm: bool = False,
        members: Sequence[int] | None = None,
    ) -> None:
        """Send `outgoing[i]` to member i and fill `incoming[i]` from it, None for nothing.

        With `confirm`, a second header says that the first were right, so that all learn of a mismatch between two.
        Where only some `members` exchange data with this one, they alone exchange headers with it.
        """
        headers = self.send_headers(_sizes(outgoing), _sizes(incoming), fingerprint, members)
        request = self.exchange_parts(outgoing, incoming)
        self.check_headers(headers)
        if confirm:
            self._check_own_size(outgoing, incoming, fingerprint)
            nothing = [0] * self.size
            self.check_headers(self.send_headers(nothing, nothing, fingerprint))
        self.wait([request], fingerprint)
        own_outgoing, own_incoming = outgoing[self.position], incoming[self.position]
        if own_outgoing is not None and own_incoming is not None and own_outgoing is not own_incoming:
            own_incoming[:] = own_outgoing

    def _check_own_size(
        self, outgoing: Sequence[Bytes | None], incoming: Sequence[Bytes | None], fingerprint: Fingerprint
    ) -> None:
        own = self.ranks[self.position]
        sent, expected = _sizes(outgoing)[self.position], _sizes(incoming)[self.position]
        if sent != expected:
            raise size_mismatch(self.name, fingerprint, own, sent, own, expected)

    def barrier(self, fingerprint: Fingerprint) -> None:
        nothing: list[Bytes | None] = [None] * self.size
        self.exchange_all(nothing, nothing, fingerprint)

    def all_gather(self, mine: Bytes, parts: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        self.exchange_all([mine] * self.size, parts, fingerprint)

    def all_to_all(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        """As in `ByteCollectives`; where two members disagree about a size, all raise, and not only those two."""
        try:
            if self.size == 2:
                self._check_own_size(outgoing, incoming, fingerprint)
            self.exchange_all(outgoing, incoming, fingerprint, confirm=self.size > 2)
        except MismatchError as error:
            self.report_mismatch(error)
            raise

    def broadcast(self, data: Bytes, root: int, fingerprint: Fingerprint) -> None:
        nothing = [0] * self.size  # the fingerprint tells the size
        headers = self.send_headers(nothing, nothing, fingerprint)
        transfer = self.broadcasting(data, root, fingerprint, spin=True)
        next(transfer)
        self.check_headers(headers)
        for _ in transfer:
            pass

    def broadcasting(self, data: Bytes, root: int, fingerprint: Fingerprint, spin: bool = False) -> Iterator[None]:
        """Overwrite `data` with the root's, whose transfer has begun at the first `yield`; without headers.

        Of large data the root sends each member one part, which that one then sends to all others but the root.
        """
        receivers = [i for i in range(self.size) if i != root]
        is_scattered = data.size > SMALL_BYTES and len(receivers) > 1
        cuts = slices(data.size, len(receivers), 1) if is_scattered else [slice(None)] * len(receivers)
        parts: list[Bytes | None] = [None] * self.size
        for member, cut in zip(receivers, cuts, strict=True):
            parts[member] = data[cut]
        nothing: list[Bytes | None] = [None] * self.size
        if self.position == root:
            yield from self.moving(parts, nothing, fingerprint, spin)
            return
        mine = parts[self.position]
        yield from self.moving(nothing, [mine if i == root else None for i in range(self.size)], fingerprint, spin)
        if is_scattered:
            passed_on = self.exchange_parts([None if i == root else mine for i in range(self.size)], parts)
            self.wait([passed_on], fingerprint, spin)

    def moving(
        self,
        outgoing: Sequence[Bytes | None],
        incoming: Sequence[Bytes | None],
        fingerprint: Fingerprint,
        spin: bool = False,
    ) -> Iterator[None]:
        """As `exchange_parts`, begun at the `yield`; the end of the iteration waits for it."""
        request = self.exchange_parts(outgoing, incoming)
        yield
        self.wait([request], fingerprint, spin)


@lru_cache(maxsize=256)
def _header(fingerprint: Fingerprint, sent: int, expected: int) -> Bytes:
    """A header, with the bytes that this member sends and expects. Nobody writes to it, so equal ones share memory."""
    header = np.zeros(_HEADER_BYTES, np.uint8)
    header[:_HEADER_TEXT].view(np.int64)[:] = fingerprint.code, sent, expected
    text = fingerprint.text.encode()[: _HEADER_BYTES - _HEADER_TEXT]
    header[_HEADER_TEXT : _HEADER_TEXT + len(text)] = np.frombuffer(text, np.uint8)
    return header


def _sizes(parts: Sequence[Bytes | None]) -> list[int]:
    return [0 if part is None else part.size for part in parts]
