"""The sending half of messages: eager or by rendezvous, as in MPI.

A message of up to `EAGER_BYTES` leaves at once, as long as the receiver has room for it: every eager message uses up
credit, which comes back when it has been received. Any other message is offered, and its data leaves when the receiver
takes the offer. A header needs no credit, so nothing waits in line behind a message that nobody receives.

Everything here is called with the lock of the progress engine held, and blocks nowhere.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterable, Iterator, Mapping

from ring_plugins.core.collectives.message_progress import Progress
from ring_plugins.core.collectives.message_request import Message
from ring_plugins.core.net.auth import Disconnected
from ring_plugins.core.net.message_stream import (
    CREDIT_BYTES,
    EAGER_BYTES,
    HEADER_BYTES,
    Address,
    Header,
    Kind,
    Outgoing,
)


class _Receiver:
    """What this process knows of one receiver.

    Attributes:
        credit: bytes that may still be sent eagerly.
        offered: messages that wait for the receiver to take them, by number.
        number: of the last offer.
        problem: why it could not connect so far.
    """

    def __init__(self, link: Outgoing[Message]) -> None:
        self.link, self.credit = link, CREDIT_BYTES
        self.offered: dict[int, Message] = {}
        self.number = 0
        self.problem = ""


class Sender:
    """Sends the messages of this process.

    Args:
        rank: of this process in the job.
        secret: of the job.
        near: ranks that a local socket reaches.
        progress: calls this when a connection is ready.
        lost: ranks whose connections are lost, with when and why; a connection that this loses is added.
    """

    def __init__(
        self, rank: int, secret: bytes, near: Iterable[int], progress: Progress, lost: dict[int, tuple[float, str]]
    ) -> None:
        self._rank, self._secret, self._near = rank, secret, set(near)
        self._progress, self._lost = progress, lost
        self._addresses: dict[int, Address] = {}
        self._receivers: dict[int, _Receiver] = {}

    def learn(self, addresses: Mapping[int, Address]) -> None:
        """Where ranks listen."""
        self._addresses.update(addresses)

    def send(self, message: Message) -> None:
        """Send eagerly if the size and the credit allow it; else offer."""
        receiver = self._receiver(message.missing()[0])
        nbytes, cost = len(message.data), len(message.data) + HEADER_BYTES
        header = Header(Kind.EAGER, 0, message.group.context, message.tag, nbytes, message.dtype)
        if nbytes <= EAGER_BYTES and cost <= receiver.credit:
            receiver.credit -= cost
            receiver.link.put(header, message.data, message)
        else:
            receiver.number = (receiver.number + 1) & 0xFFFFFFFF
            receiver.offered[receiver.number] = message
            receiver.link.put(header._replace(kind=Kind.OFFER, number=receiver.number))
        self._write(receiver)

    def tell(self, rank: int, kind: Kind, context: int) -> None:
        """Send a header about a group, behind the messages that were sent before."""
        receiver = self._receiver(rank)
        receiver.link.put(Header(kind, context=context))
        self._write(receiver)

    def copy_unsent(self, message: Message) -> None:
        """Send what is left of a message from a copy, since its owner may overwrite the data from now on."""
        self._receivers[message.missing()[0]].link.copy_unsent(message.data)

    def withdraw(self, message: Message) -> None:
        """Take an offer back; send what is left of a message that has begun from a copy."""
        offered = self._receivers[message.missing()[0]].offered
        for number in [number for number, one in offered.items() if one is message]:
            del offered[number]
        self.copy_unsent(message)

    def _receiver(self, rank: int) -> _Receiver:
        receiver = self._receivers.get(rank)
        if receiver is None:
            link: Outgoing[Message] = Outgoing(
                rank, self._addresses[rank], rank in self._near, self._secret, self._rank
            )
            receiver = self._receivers[rank] = _Receiver(link)
        return receiver

    # Connections ----------------------------------------------------------------------------------

    def write_unsent(self) -> None:
        """Continue with all connections that have something to send, and connect again where that failed."""
        for receiver in self._receivers.values():
            if receiver.link.has_unsent():
                self._write(receiver)

    def _write(self, receiver: _Receiver) -> None:
        """Send what can be sent now, connecting first; and wake up for the rest."""
        link = receiver.link
        if link.peer in self._lost:
            return  # the tick tells why
        try:
            if not link.ready:
                receiver.problem = link.connect() or receiver.problem
            if link.ready:
                for message in link.write():
                    self._progress.finish(message)
        except Disconnected as error:
            self._lose(receiver, error)
            return
        if link.socket is not None:
            connecting = select.EPOLLIN if link.has_unsent() else 0
            wanted = select.EPOLLIN | (select.EPOLLOUT if link.has_unsent() and link.ready else connecting)
            self._progress.register(link.socket.fileno(), receiver, wanted, self._handle)

    def _handle(self, receiver: _Receiver, events: int) -> None:
        if receiver.link.ready and events & ~select.EPOLLOUT:
            self._read(receiver)
        if receiver.link.has_unsent():
            self._write(receiver)

    def _read(self, receiver: _Receiver) -> None:
        """Do what the receiver answered."""
        try:
            for reply in receiver.link.read():
                if reply.kind == Kind.CREDIT:
                    receiver.credit += reply.nbytes
                    continue
                message = receiver.offered.pop(reply.number, None)
                if reply.kind == Kind.TAKE and message is not None:
                    header = Header(Kind.DATA, reply.number, nbytes=len(message.data))
                    receiver.link.put(header, message.data, message)
                elif reply.kind == Kind.TAKE:
                    receiver.link.put(Header(Kind.GONE, reply.number))
                elif reply.kind == Kind.GONE and message is not None:
                    self._progress.finish(message, message.closed_by(receiver.link.peer))
                elif message is not None:
                    expected = f"receive({reply.nbytes} bytes of {reply.dtype})"
                    self._progress.finish(message, message.rejected_by(receiver.link.peer, expected))
        except Disconnected as error:
            self._lose(receiver, error)

    def _lose(self, receiver: _Receiver, error: Disconnected) -> None:
        if receiver.link.socket is not None:
            self._progress.forget(receiver.link.socket.fileno())
        receiver.link.close()
        self._lost.setdefault(receiver.link.peer, (time.monotonic(), str(error)))

    # Questions of others --------------------------------------------------------------------------

    def problem(self, rank: int) -> str:
        """Why there is no connection to a rank yet, "" if there is one or nothing went wrong."""
        receiver = self._receivers.get(rank)
        return "" if receiver is None or receiver.link.ready else receiver.problem

    def moved(self) -> int:
        """Bytes written so far."""
        return sum(receiver.link.moved for receiver in self._receivers.values())

    def under_way(self) -> Iterator[Message]:
        """Messages whose data waits for its connection or has left in part."""
        receivers = self._receivers.items()
        return (message for rank, one in receivers if rank not in self._lost for message in one.link.unsent())

    def is_connected(self) -> bool:
        return any(receiver.link.ready for receiver in self._receivers.values())

    def shut_down(self) -> None:
        """Send nothing more, but read the receivers' answers until they close their ends."""
        for receiver in self._receivers.values():
            if receiver.link.ready and receiver.link.socket is not None:
                with contextlib.suppress(OSError):
                    receiver.link.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.link.close()
