"""The receiving half of messages: where the data of every message goes.

The data of a message goes straight into the tensor of its receive, if that is posted. An eager message that nobody
expects is kept, and copied once it is received. An offer that nobody expects is noted, and taken once it is received.
What is kept is bounded by the sender's credit, which is returned when an eager message has been received.

Everything here is called with the lock of the progress engine held, and blocks nowhere.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ring_plugins.core.collectives.message_closing import ClosedGroups
from ring_plugins.core.collectives.message_matching import Matching, Unexpected
from ring_plugins.core.collectives.message_progress import Progress
from ring_plugins.core.collectives.message_request import Message
from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import Claim, Disconnected, Purpose
from ring_plugins.core.net.message_stream import (
    CREDIT_BYTES,
    EAGER_BYTES,
    HEADER_BYTES,
    Address,
    Header,
    Incoming,
    Kind,
)

#: Bytes of received messages that are collected before credit for them is returned.
_RETURN_CREDIT = CREDIT_BYTES // 4
#: Unauthenticated connections kept beside those of the job.
_OTHER_CONNECTIONS = 64


class _Target(NamedTuple):
    """Where the data that is arriving goes: to a receive, to an unexpected message, or nowhere.

    Attributes:
        credit: bytes to return once it is there.
    """

    receive: Message | None
    unexpected: Unexpected | None
    credit: int


class Receiver:
    """Receives the messages of this process.

    Args:
        rank: of this process in the job.
        secret: of the job.
        addresses: of this host, for ranks of other hosts; empty if there are none.
        progress: calls this when a connection is ready.
        closed_groups: knows whose messages are not wanted any more, or will not come.
        lost: ranks whose connections are lost, with when and why; a connection that this loses is added.

    Attributes:
        address: for other ranks, which must know it before they send.
    """

    def __init__(
        self,
        rank: int,
        secret: bytes,
        addresses: Sequence[str],
        progress: Progress,
        closed_groups: ClosedGroups,
        lost: dict[int, tuple[float, str]],
    ) -> None:
        self._rank, self._progress, self._closed_groups, self._lost = rank, progress, closed_groups, lost
        self._links: dict[int, Incoming[_Target]] = {}
        self._matching = Matching()
        #: Receives whose offers were taken, by sender and number of the offer.
        self._taken: dict[tuple[int, int], Message] = {}
        #: By sender, the bytes received for which it has no credit yet.
        self._received: dict[int, int] = {}
        self._acceptor = Acceptor(secret, Purpose.MESSAGES, self._expects, limit=1024 + _OTHER_CONNECTIONS)
        self.address = self._listen(addresses)
        progress.register(
            self._acceptor.fileno(), self._acceptor, select.EPOLLIN, lambda acceptor, events: self.accept()
        )

    def _listen(self, addresses: Sequence[str]) -> Address:
        local = f"ring_plugins/{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{local}")
        listener.listen(1024)
        self._acceptor.add(listener)
        if not addresses:
            return Address(local)
        address = addresses[0] if len(addresses) == 1 else ""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        remote = socket.create_server((address, 0), family=family, backlog=1024)
        self._acceptor.add(remote)
        return Address(local, list(addresses), remote.getsockname()[1])

    def _expects(self, claim: Claim) -> bool:
        return claim.target == self._rank and claim.rank != self._rank and claim.rank >= 0

    # Receives -------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """Match a receive with a message that is here, or post it."""
        unexpected = self._matching.match_receive(message)
        if unexpected is not None:
            self._match(message, unexpected)
        elif self._closed_groups.cannot_come(message):
            self._progress.finish(message, message.closed_by(message.missing()[0]))
        else:
            self._matching.post(message)

    def cancel(self, message: Message) -> bool:
        """Take back a receive; returns whether it was still posted."""
        return self._matching.cancel(message)

    def divert(self, message: Message) -> None:
        """Let what is on its way to a receive arrive in memory that nobody uses."""
        message.data = memoryview(bytearray(len(message.data)))
        for link in self._links.values():
            if link.item is not None and link.item.receive is message:
                link.divert()

    def close_group(self, context: int) -> None:
        """Drop the unexpected messages of a group, and tell their senders."""
        for message in self._matching.close(context):  # a reply may find a connection lost, and what came over it
            if message.data is None:
                self._reply(message.link, Header(Kind.GONE, message.header.number))
            elif message.is_whole:
                self._return_credit(message.link, len(message.data) + HEADER_BYTES)

    def _match(self, message: Message, unexpected: Unexpected) -> None:
        message.source = message.group.ranks.index(unexpected.link.peer)
        if not unexpected.is_whole:
            unexpected.receive = message
        elif unexpected.data is None:
            self._take(message, unexpected.link, unexpected.header)
        else:
            self._copy(message, unexpected)

    def _copy(self, message: Message, unexpected: Unexpected) -> None:
        assert unexpected.data is not None
        if self._fits(message, unexpected.link.peer, unexpected.header):
            message.data[:] = unexpected.data
            self._progress.finish(message)
        self._return_credit(unexpected.link, len(unexpected.data) + HEADER_BYTES)

    def _take(self, message: Message, link: Incoming[_Target], header: Header) -> None:
        if self._fits(message, link.peer, header):
            self._taken[link.peer, header.number] = message
            self._reply(link, Header(Kind.TAKE, header.number))
        else:
            self._reply(link, Header(Kind.REJECT, header.number, nbytes=len(message.data), dtype=message.dtype))

    def _fits(self, message: Message, sender: int, header: Header) -> bool:
        if header.nbytes == len(message.data) and header.dtype == message.dtype[:24]:
            return True
        theirs = f"send({header.nbytes} bytes of {header.dtype})"
        self._progress.finish(message, message.rejected_by(sender, theirs))
        return False

    # Replies --------------------------------------------------------------------------------------

    def _return_credit(self, link: Incoming[_Target], nbytes: int) -> None:
        received = self._received.get(link.peer, 0) + nbytes
        if received >= _RETURN_CREDIT:
            self._reply(link, Header(Kind.CREDIT, nbytes=received))
            received = 0
        self._received[link.peer] = received

    def _reply(self, link: Incoming[_Target], header: Header) -> None:
        if self._progress.closed or self._links.get(link.peer) is not link:
            return  # if it is lost, the tick tells why
        link.reply(header)
        self._write(link)

    def _write(self, link: Incoming[_Target]) -> None:
        try:
            link.write()
        except Disconnected as error:
            self._lose(link, error)
            return
        wanted = select.EPOLLIN | (select.EPOLLOUT if link.has_unsent() else 0)
        self._progress.register(link.socket.fileno(), link, wanted, self._handle)

    # What arrives ---------------------------------------------------------------------------------

    def accept(self) -> None:
        """Accept connections, and drop those that stay silent."""
        for connected, claim, _ in self._acceptor.poll():
            link: Incoming[_Target] = Incoming(claim.rank, connected)
            old = self._links.pop(claim.rank, None)
            if old is not None:
                self._lose(old, Disconnected("it connected again"))
            self._lost.pop(claim.rank, None)
            self._links[claim.rank] = link
            self._progress.register(connected.fileno(), link, select.EPOLLIN, self._handle)
            self._read(link)

    def _handle(self, link: Incoming[_Target], events: int) -> None:
        if events & select.EPOLLOUT:
            self._write(link)
        if self._progress.owner(link.socket.fileno()) is link:
            self._read(link)

    def _read(self, link: Incoming[_Target]) -> None:
        link.waits = False
        try:
            while True:
                if link.item is not None:
                    target = link.filled()
                    if target is None:
                        return
                    self._arrive(link, target)
                    continue
                header = link.next_header()
                if header is None:
                    return
                self._begin(link, header)
        except Disconnected as error:
            self._lose(link, error)

    def _begin(self, link: Incoming[_Target], header: Header) -> None:
        """Do what a header asks for, and decide where the data behind it goes."""
        if header.kind in (Kind.EAGER, Kind.OFFER):
            self._begin_message(link, header)
            return
        if header.kind == Kind.ASK:
            self._closed_groups.answer(link.peer, header.context)
            return
        if header.kind == Kind.CLOSED:
            self._end_receives(header.context, link.peer)
            return
        taken = self._taken.pop((link.peer, header.number), None)
        if header.kind == Kind.DATA and taken is not None and len(taken.data) == header.nbytes:
            link.fill(taken.data, _Target(taken, None, 0))
        elif header.kind == Kind.GONE and taken is not None:
            self._progress.finish(taken, taken.closed_by(link.peer))
        else:
            raise Disconnected("it sent data that nobody asked for")

    def _begin_message(self, link: Incoming[_Target], header: Header) -> None:
        eager = header.kind == Kind.EAGER
        if eager and header.nbytes > EAGER_BYTES:
            raise Disconnected(f"it sent {header.nbytes} bytes without asking")
        message = self._matching.match_message(link.peer, header)
        cost = header.nbytes + HEADER_BYTES
        if message is not None:
            message.source = message.group.ranks.index(link.peer)
            if not eager:
                self._take(message, link, header)
            elif self._fits(message, link.peer, header):
                link.fill(message.data, _Target(message, None, cost))
            else:
                link.fill(memoryview(bytearray(header.nbytes)), _Target(None, None, cost))
        elif self._closed_groups.is_closed(header.context):
            if eager:
                link.fill(memoryview(bytearray(header.nbytes)), _Target(None, None, cost))
            else:
                self._reply(link, Header(Kind.GONE, header.number))
        else:
            unexpected = Unexpected(link, header, bytearray(header.nbytes) if eager else None)
            self._matching.add_unexpected(unexpected)
            if unexpected.data is not None:
                link.fill(memoryview(unexpected.data), _Target(None, unexpected, 0))

    def _arrive(self, link: Incoming[_Target], target: _Target) -> None:
        """The data of a message is complete."""
        message, unexpected, credit = target
        if message is not None:
            self._progress.finish(message)
        if credit:
            self._return_credit(link, credit)
        if unexpected is not None:
            unexpected.is_whole = True
            if unexpected.receive is not None:
                self._copy(unexpected.receive, unexpected)
            elif self._closed_groups.is_closed(unexpected.header.context):
                self._return_credit(link, unexpected.header.nbytes + HEADER_BYTES)

    def _end_receives(self, context: int, sender: int) -> None:
        """End the receives that no sender can complete any more: this one, the last of theirs, has closed the group."""
        self._closed_groups.learn(sender, context)
        for message in self._matching.posted_in(context):
            if self._closed_groups.cannot_come(message):
                self._matching.cancel(message)
                self._progress.finish(message, message.closed_by(sender))

    def _lose(self, link: Incoming[_Target], error: Disconnected) -> None:
        self._progress.forget(link.socket.fileno())
        link.close()
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        self._matching.lose(link)
        self._lost.setdefault(link.peer, (time.monotonic(), str(error)))

    # Questions of others --------------------------------------------------------------------------

    def is_connected(self, ranks: Iterable[int]) -> bool:
        """Whether more can arrive from one of these ranks."""
        return any(rank in self._links for rank in ranks)

    def moved(self) -> int:
        """Bytes read so far."""
        return sum(link.moved for link in self._links.values())

    def under_way(self) -> Iterator[Message]:
        """Receives whose data is on its way."""
        yield from (message for (rank, _), message in self._taken.items() if rank not in self._lost)
        for target in [link.item for link in self._links.values() if link.item is not None]:
            message = target.unexpected.receive if target.unexpected is not None else target.receive
            if message is not None:
                yield message

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._acceptor.close()
