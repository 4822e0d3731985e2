"""Tagged messages between any two ranks, at any time: what `send` and `recv` of MPI and torch.distributed need.

The problem. Collectives have fixed members and an order that all of them know. Messages have neither: a receiver may
ask for tag 7 before tag 3, from one rank or from whichever sends first, and two ranks that both send before they
receive must not wait for each other. A program may use a new tag in every step, so a tag must not cost anything that
stays.

The idea is that of MPI. A pair of ranks has one connection for each direction, whatever the tags
(net/message_stream.py). A receiver matches by tag and sender, in the order of arrival. A message of up to `EAGER_BYTES`
is sent at once and kept at the receiver if nobody has asked for it yet. A larger one is offered, and its data leaves
when the receiver asks for it, straight into the receiver's tensor. What a receiver keeps is bounded: a sender may have
`CREDIT_BYTES` of messages under way that have not been fetched, and offers what is beyond that. Nothing waits in line
behind a message that nobody fetches.

A receiver that waits for long asks its sender to tell when it closes the group; the answer travels behind the sender's
messages. A rank that can no longer take part in a group, because an exception took a message apart, breaks it on all
members, through the failure detector.

A process has one `Messenger` for all groups, with one thread that moves bytes. A caller that waits moves them itself
while it is alone, since waking up another thread takes longer than a small message.

Considered and rejected: a communicator of two ranks for each tag (a thread, files and mappings for every new tag); one
for each pair with unlimited room for messages that nobody has asked for (MPI programs that receive in reverse order
would run out of memory); shared memory inside a host (a unix socket moves 1 MiB as fast, and wakes up a rank that
waits). A waiting caller does not spin: on cores that other processes use too, that made a round trip of 64 bytes
slower, 430 us instead of 290.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import PeerFailed, RingError, TimeoutExceeded, fresh, name_ranks
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.base.types import Bytes
from ring_plugins.core.collectives.fingerprint import mismatch
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.wait import LongWait, long_waits, nap_precisely
from ring_plugins.core.net.auth import Acceptor, Claim, Disconnected, Purpose
from ring_plugins.core.net.message_stream import HEADER_BYTES, Address, Header, Incoming, Kind, Outgoing

T = TypeVar("T")

#: Bytes up to which a message is sent before the receiver asks for it, and bytes that a receiver keeps of one sender.
EAGER_BYTES, CREDIT_BYTES = 1 << 20, 4 << 20
#: Bytes of fetched messages that a receiver collects before it returns the credit.
_RETURN_CREDIT = CREDIT_BYTES // 4
#: Seconds between two looks at whether pending messages can still arrive, and at connections while none is pending.
_TICK, _IDLE = 0.1, 1.0
#: Seconds after which a pending message is looked at, and after which it is published in `long_waits`.
_YOUNG, _LONG = 0.02, 1.0
#: Seconds for which a lost connection waits for the peer's own reason, as in control/wait.py.
_REASON = 3.0
#: Seconds without a moved byte after which closing stops waiting for a peer, and in which a peer closes its end.
_STALLED, _LINGER = 5.0, 2.0
#: Seconds that a caller moves the bytes, and that the thread then pauses before it looks whether a caller still does.
_DRIVE, _PARK = 0.02, 0.005
#: Unauthenticated connections kept beside those of the job, and long waits that are published.
_OTHER_CONNECTIONS, _PUBLISHED = 64, 16


class Message:
    """A send or receive under way.

    Args:
        verb: "send" or "receive".
        group: that it belongs to.
        peer: position of the other end in the group, None for a receive from whichever member sends first.
        tag: the caller's.
        dtype: name of the element type.
        data: to send or to fill.
        finished: called once, with the error or None; any thread.

    Attributes:
        source: position of the sender, once a receive is matched.
        done: whether `finished` is about to be called or has been.
        blocked_since: since when a caller waits for it, 0 while none does.
    """

    def __init__(
        self,
        verb: str,
        group: MessageGroup,
        peer: int | None,
        tag: int,
        dtype: str,
        data: Bytes,
        finished: Callable[[BaseException | None], None],
    ) -> None:
        self.verb, self.group, self.peer, self.tag, self.dtype = verb, group, peer, tag, dtype
        self.data = memoryview(data)
        self.source = -1 if peer is None else peer
        self.since, self.blocked_since = time.monotonic(), 0.0
        self.done = False
        self.error: BaseException | None = None
        self.finished = finished

    def name(self) -> str:
        """The channel, which both ends name alike."""
        peer = "any rank" if self.peer is None else str(self.peer)
        ends = (str(self.group.rank), peer) if self.verb == "send" else (peer, str(self.group.rank))
        return f"{self.group.name}, {' to '.join(ends)}, tag {self.tag}"

    def what(self) -> str:
        """The operation, which both ends name alike: one that sends does not wait in another one than its receiver."""
        return f"send and recv in {self.name()}"

    def missing(self) -> list[int]:
        """World ranks that it waits for."""
        if self.peer is not None:
            return [self.group.ranks[self.peer]]
        return [rank for position, rank in enumerate(self.group.ranks) if position != self.group.rank]

    def matches(self, sender: int) -> bool:
        return self.peer is None or self.group.ranks[self.peer] == sender

    def text(self) -> str:
        return f"{self.verb}({len(self.data)} bytes of {self.dtype})"


class _Arrival:
    """A message that nobody has asked for yet: its data, or an offer of it."""

    def __init__(self, link: Incoming[_Target], header: Header, data: bytearray | None) -> None:
        self.link, self.header, self.data = link, header, data
        self.whole = data is None
        self.taker: Message | None = None


class _Target(NamedTuple):
    """Where the data that is being received goes: to a message, to an arrival, or nowhere."""

    message: Message | None
    arrival: _Arrival | None
    credit: int


class _Peer:
    """The sending side of a connection.

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


class MessageGroup:
    """The messages of one group of ranks.

    Args:
        messenger: of this process.
        context: number of the group, equal on all members and used by no other group.
        name: for errors.
        ranks: world ranks of the members.
        addresses: of the members' messengers, by world rank.
    """

    def __init__(
        self, messenger: Messenger, context: int, name: str, ranks: Sequence[int], addresses: Mapping[int, Address]
    ) -> None:
        self.context, self.name, self.ranks = context, name, tuple(ranks)
        self.rank = self.ranks.index(messenger.rank)
        self._messenger = messenger
        messenger.join(self, addresses)

    def fail(self, error: BaseException) -> None:
        """End all messages under way and refuse further ones; the failure detector calls this for another member."""
        self._messenger.break_group(self, error)

    def send(
        self, data: Bytes, dtype: str, receiver: int, tag: int, finished: Callable[[BaseException | None], None]
    ) -> Message:
        """Start to send; `data` stays unchanged until `finished` is called.

        Args:
            data: contiguous bytes.
            dtype: name of the element type, which the receiver compares with its own.
            receiver: position in the group, not this process's.
            tag: any 64-bit integer.
            finished: see `Message`.
        """
        return self._messenger.start(Message("send", self, receiver, tag, dtype, data, finished))

    def receive(
        self, data: Bytes, dtype: str, sender: int | None, tag: int, finished: Callable[[BaseException | None], None]
    ) -> Message:
        """Start to receive into `data`; arguments as for `send`. A sender of None stands for any member."""
        return self._messenger.start(Message("receive", self, sender, tag, dtype, data, finished))

    def wait(self, message: Message, seconds: float | None = None) -> None:
        """Help to move bytes until the message is done, or for `seconds`; it may return earlier."""
        self._messenger.drive(message, seconds)

    def interrupt(self, message: Message, cause: BaseException) -> None:
        """Let go of a message's memory: `cause` ended the wait for it, and the script may use the memory again.

        A send goes on from a copy. A receive ends with an error; if its message was already on the way, that is lost
        and all members refuse further messages of the group.
        """
        self._messenger.interrupt(message, cause)

    def close(self) -> None:
        """Finish messages that both ends have started; drop those that only this end has."""
        self._messenger.close_group(self.context)


class Messenger:
    """Sends and receives the messages of this process.

    Args:
        rank: of this process in the job.
        secret: of the job.
        near: ranks that a local socket reaches.
        addresses: of this host, for ranks of other hosts; empty if there are none.
        failure_detector: knows which ranks have failed or left; None in tests.

    Attributes:
        address: for other ranks, which must know it before they send.
    """

    def __init__(
        self,
        rank: int,
        secret: bytes,
        near: Iterable[int],
        addresses: Sequence[str] = (),
        failure_detector: FailureDetector | None = None,
    ) -> None:
        self.rank = rank
        self._secret, self._near, self._failure_detector = secret, set(near), failure_detector
        self._timeout = config.TIMEOUT.get()
        self._lock = threading.RLock()
        self._outgoing: dict[int, _Peer] = {}
        self._incoming: dict[int, Incoming[_Target]] = {}
        self._lost: dict[int, tuple[float, str]] = {}
        self._addresses: dict[int, Address] = {}
        #: Receives that wait for a message, and messages that wait for a receive, by context and tag, the oldest first.
        self._posted: dict[tuple[int, int], list[Message]] = {}
        self._arrived: dict[tuple[int, int], list[_Arrival]] = {}
        #: Receives whose offers were taken, by sender and number of the offer.
        self._taken: dict[tuple[int, int], Message] = {}
        #: By sender, the bytes fetched for which it has no credit yet.
        self._fetched: dict[int, int] = {}
        self._pending: set[Message] = set()
        self._done: list[Message] = []
        self._closed_contexts: set[int] = set()
        #: Why groups refuse further messages, by context.
        self._broken: dict[int, BaseException] = {}
        self._groups: weakref.WeakValueDictionary[int, MessageGroup] = weakref.WeakValueDictionary()
        #: By context, ranks that want to know when this one closes the group.
        self._askers: dict[int, set[int]] = {}
        #: Groups and ranks that were asked the same, and those that have answered.
        self._asked: set[tuple[int, int]] = set()
        self._closed_by: set[tuple[int, int]] = set()
        self._closed = False
        #: The message that a caller waits for while it moves the bytes, and its thread.
        self._driver: tuple[Message, int] | None = None
        self._unpark = threading.Event()
        self._next_tick = 0.0
        self._epoll = select.epoll()
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._kick, select.EPOLLIN)
        self._acceptor = Acceptor(secret, Purpose.MESSAGES, self._expects, limit=1024 + _OTHER_CONNECTIONS)
        self.address = self._listen(addresses)
        self._epoll.register(self._acceptor.fileno(), select.EPOLLIN)
        #: What each file in the selector belongs to.
        self._files: dict[int, _Peer | Incoming[_Target]] = {}
        self._thread = HelperThread(self._serve, "ring:messages", outside_a_job=self._fail_all)
        self._thread.start()

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

    def join(self, group: MessageGroup, addresses: Mapping[int, Address]) -> None:
        """Learn of a group, and where its members listen."""
        with self._lock:
            self._addresses.update(addresses)
            self._groups[group.context] = group
        if self._failure_detector is not None:
            self._failure_detector.watch(group.context, group)

    def _expects(self, claim: Claim) -> bool:
        return claim.target == self.rank and claim.rank != self.rank

    # Callers --------------------------------------------------------------------------------------

    def start(self, message: Message) -> Message:
        """Start a send or receive.

        Raises:
            RingError: the group is closed or broken.
        """
        with self._lock:
            if message.group.context in self._broken:
                raise fresh(self._broken[message.group.context])
            if self._closed or message.group.context in self._closed_contexts:
                raise RingError(f"{message.group.name} has been closed.")
            self._pending.add(message)
            if message.verb == "send":
                self._send(message)
            else:
                self._receive(message)
        self._announce()
        return message

    def drive(self, message: Message, seconds: float | None) -> None:
        """Move bytes in the caller's thread until the message is done, but only for as long as that pays."""
        with self._lock:
            if self._driver is not None or message.done or self._closed:
                return
            self._driver = message, threading.get_ident()
            self._unpark.clear()
        end = time.monotonic() + (_DRIVE if seconds is None else min(seconds, _DRIVE))
        try:
            while not message.done and (left := end - time.monotonic()) > 0:
                self._step(left)
        finally:
            with self._lock:
                self._driver = None
                if self._pending:
                    self._unpark.set()

    def interrupt(self, message: Message, cause: BaseException) -> None:
        """See `MessageGroup.interrupt`."""
        with self._lock:
            if not message.done and message.verb == "send":
                peer = self._outgoing[message.missing()[0]]
                peer.link.copy_unsent(message.data)
                message.data = memoryview(bytes(message.data))
            elif not message.done:
                self._let_go(message, cause)
        self._announce()

    def _let_go(self, message: Message, cause: BaseException) -> None:
        group = message.group
        text = f"rank {group.ranks[group.rank]} was interrupted in {message.name()} by {type(cause).__name__}"
        if self._drop(message):
            self._finish(message, RingError(f"{text} before its message came; receive it again."))
            return
        self._divert(message)
        error = RingError(
            f"{text}, and the message that was arriving is lost; to continue, all ranks must recreate {group.name}."
        )
        self._broken.setdefault(group.context, error)
        self._finish(message, error)
        self._tell_broken(group.context, error)

    def _withdraw(self, message: Message) -> None:
        """Take an offer back; send what is left of a message that has begun from a copy."""
        peer = self._outgoing[message.missing()[0]]
        for number in [number for number, offered in peer.offered.items() if offered is message]:
            del peer.offered[number]
        peer.link.copy_unsent(message.data)

    def _divert(self, message: Message) -> None:
        """Let what is on its way to a receive arrive in memory that nobody uses."""
        message.data = memoryview(bytearray(len(message.data)))
        for link in self._incoming.values():
            if link.item is not None and link.item.message is message:
                link.divert()

    def _tell_broken(self, context: int, error: BaseException) -> None:
        if self._failure_detector is not None:
            self._failure_detector.break_communicator(context, str(error), ())

    def break_group(self, group: MessageGroup, error: BaseException) -> None:
        """See `MessageGroup.fail`."""
        with self._lock:
            self._broken.setdefault(group.context, error)
            for message in [one for one in self._pending if one.group.context == group.context]:
                if message.verb == "send":
                    self._withdraw(message)
                elif not self._drop(message):
                    self._divert(message)
                self._finish(message, fresh(error))
        self._announce()

    def _announce(self) -> None:
        """Tell the owners of messages that are done; without the lock, since they may start further ones."""
        while self._done:
            with self._lock:
                done, self._done = self._done, []
            driver = self._driver
            for message in done:
                message.finished(message.error)
                if driver is not None and message is driver[0] and driver[1] != threading.get_ident():
                    os.eventfd_write(self._kick, 1)

    def _finish(self, message: Message, error: BaseException | None = None) -> None:
        if not message.done:
            message.error, message.done = error, True
            self._pending.discard(message)
            long_waits.pop(message, None)
            self._done.append(message)

    # Sending --------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        peer = self._outgoing_to(message.missing()[0])
        nbytes, cost = len(message.data), len(message.data) + HEADER_BYTES
        header = Header(Kind.EAGER, 0, message.group.context, message.tag, nbytes, message.dtype)
        if nbytes <= EAGER_BYTES and cost <= peer.credit:
            peer.credit -= cost
            peer.link.put(header, message.data, message)
        else:
            peer.number = (peer.number + 1) & 0xFFFFFFFF
            peer.offered[peer.number] = message
            peer.link.put(header._replace(kind=Kind.OFFER, number=peer.number))
        self._write(peer)

    def _outgoing_to(self, receiver: int) -> _Peer:
        peer = self._outgoing.get(receiver)
        if peer is None:
            link: Outgoing[Message] = Outgoing(
                receiver, self._addresses[receiver], receiver in self._near, self._secret, self.rank
            )
            peer = self._outgoing[receiver] = _Peer(link)
        return peer

    def _tell(self, rank: int, kind: Kind, context: int) -> None:
        peer = self._outgoing_to(rank)
        peer.link.put(Header(kind, context=context))
        self._write(peer)

    def _write(self, peer: _Peer) -> None:
        """Send what can be sent now, connecting first; and wake up for the rest."""
        link = peer.link
        if link.peer in self._lost:
            return  # the tick tells why
        try:
            if not link.ready:
                peer.problem = link.connect() or peer.problem
            if link.ready:
                for message in link.write():
                    self._finish(message)
        except Disconnected as error:
            self._lose_peer(peer, error)
            return
        if link.socket is not None:
            connecting = select.EPOLLIN if link.has_unsent() else 0
            wanted = select.EPOLLIN | (select.EPOLLOUT if link.has_unsent() and link.ready else connecting)
            self._register(link.socket.fileno(), peer, wanted)

    def _register(self, fd: int, owner: _Peer | Incoming[_Target], events: int) -> None:
        if self._files.get(fd) is not owner:
            with contextlib.suppress(FileNotFoundError):
                self._epoll.unregister(fd)
            self._files[fd] = owner
            self._epoll.register(fd, events)
            return
        try:
            self._epoll.modify(fd, events)
        except FileNotFoundError:  # a new socket of the same owner that got the number of its old one
            self._epoll.register(fd, events)

    def _read_replies(self, peer: _Peer) -> None:
        try:
            for reply in peer.link.read():
                if reply.kind == Kind.CREDIT:
                    peer.credit += reply.nbytes
                    continue
                message = peer.offered.pop(reply.number, None)
                if reply.kind == Kind.TAKE and message is not None:
                    peer.link.put(Header(Kind.DATA, reply.number, nbytes=len(message.data)), message.data, message)
                elif reply.kind == Kind.TAKE:
                    peer.link.put(Header(Kind.GONE, reply.number))
                elif reply.kind == Kind.GONE and message is not None:
                    self._finish(message, _closed_by(message, peer.link.peer))
                elif message is not None:
                    expected = f"receive({reply.nbytes} bytes of {reply.dtype})"
                    self._finish(message, _mismatch(message, peer.link.peer, expected))
        except Disconnected as error:
            self._lose_peer(peer, error)

    def _lose_peer(self, peer: _Peer, error: Disconnected) -> None:
        if peer.link.socket is not None:
            self._forget(peer.link.socket.fileno())
        peer.link.close()
        self._lost.setdefault(peer.link.peer, (time.monotonic(), str(error)))

    def _forget(self, fd: int) -> None:
        self._files.pop(fd, None)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)

    # Receiving ------------------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        key = (message.group.context, message.tag)
        for arrival in self._arrived.get(key, ()):
            if message.matches(arrival.link.peer):
                self._remove(self._arrived, key, arrival)
                self._match(message, arrival)
                return
        if self._is_closed_by_senders(message):
            self._finish(message, _closed_by(message, message.missing()[0]))
            return
        self._posted.setdefault(key, []).append(message)

    def _is_closed_by_senders(self, message: Message) -> bool:
        return all((message.group.context, rank) in self._closed_by for rank in message.missing())

    def _remove(self, where: dict[tuple[int, int], list[T]], key: tuple[int, int], item: T) -> None:
        where[key].remove(item)
        if not where[key]:
            del where[key]

    def _match(self, message: Message, arrival: _Arrival) -> None:
        message.source = message.group.ranks.index(arrival.link.peer)
        if not arrival.whole:
            arrival.taker = message
        elif arrival.data is None:
            self._take(message, arrival.link, arrival.header)
        else:
            self._copy(message, arrival)

    def _copy(self, message: Message, arrival: _Arrival) -> None:
        assert arrival.data is not None
        if self._fits(message, arrival.link.peer, arrival.header):
            message.data[:] = arrival.data
            self._finish(message)
        self._return_credit(arrival.link, len(arrival.data) + HEADER_BYTES)

    def _take(self, message: Message, link: Incoming[_Target], header: Header) -> None:
        if self._fits(message, link.peer, header):
            self._taken[link.peer, header.number] = message
            self._reply(link, Header(Kind.TAKE, header.number))
        else:
            self._reply(link, Header(Kind.REFUSE, header.number, nbytes=len(message.data), dtype=message.dtype))

    def _fits(self, message: Message, sender: int, header: Header) -> bool:
        if header.nbytes == len(message.data) and header.dtype == message.dtype[:24]:
            return True
        self._finish(message, _mismatch(message, sender, f"send({header.nbytes} bytes of {header.dtype})"))
        return False

    def _return_credit(self, link: Incoming[_Target], nbytes: int) -> None:
        fetched = self._fetched.get(link.peer, 0) + nbytes
        if fetched >= _RETURN_CREDIT:
            self._reply(link, Header(Kind.CREDIT, nbytes=fetched))
            fetched = 0
        self._fetched[link.peer] = fetched

    def _reply(self, link: Incoming[_Target], header: Header) -> None:
        if self._closed or self._incoming.get(link.peer) is not link:
            return  # if it is lost, the tick tells why
        link.reply(header)
        self._write_replies(link)

    def _write_replies(self, link: Incoming[_Target]) -> None:
        try:
            link.write()
        except Disconnected as error:
            self._lose_link(link, error)
            return
        wanted = select.EPOLLIN | (select.EPOLLOUT if link.has_unsent() else 0)
        self._register(link.socket.fileno(), link, wanted)

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
            self._lose_link(link, error)

    def _begin(self, link: Incoming[_Target], header: Header) -> None:
        """Decide where the data behind a header goes."""
        if header.kind in (Kind.EAGER, Kind.OFFER):
            self._begin_message(link, header)
            return
        if header.kind == Kind.ASK:
            if header.context in self._closed_contexts:
                self._tell(link.peer, Kind.CLOSED, header.context)
            else:
                self._askers.setdefault(header.context, set()).add(link.peer)
            return
        if header.kind == Kind.CLOSED:
            self._end_receives(header.context, link.peer)
            return
        taken = self._taken.pop((link.peer, header.number), None)
        if header.kind == Kind.DATA and taken is not None and len(taken.data) == header.nbytes:
            link.fill(taken.data, _Target(taken, None, 0))
        elif header.kind == Kind.GONE and taken is not None:
            self._finish(taken, _closed_by(taken, link.peer))
        else:
            raise Disconnected("it sent data that nobody asked for")

    def _end_receives(self, context: int, sender: int) -> None:
        """End the receives that no sender can complete any more: this one, the last of theirs, has closed the group."""
        self._closed_by.add((context, sender))
        for key in [key for key in self._posted if key[0] == context]:
            for message in [one for one in self._posted[key] if self._is_closed_by_senders(one)]:
                self._remove(self._posted, key, message)
                self._finish(message, _closed_by(message, sender))

    def _begin_message(self, link: Incoming[_Target], header: Header) -> None:
        eager, key = header.kind == Kind.EAGER, (header.context, header.tag)
        if eager and header.nbytes > EAGER_BYTES:
            raise Disconnected(f"it sent {header.nbytes} bytes without asking")
        message = next((posted for posted in self._posted.get(key, ()) if posted.matches(link.peer)), None)
        cost = header.nbytes + HEADER_BYTES
        if message is not None:
            self._remove(self._posted, key, message)
            message.source = message.group.ranks.index(link.peer)
            if not eager:
                self._take(message, link, header)
            elif self._fits(message, link.peer, header):
                link.fill(message.data, _Target(message, None, cost))
            else:
                link.fill(memoryview(bytearray(header.nbytes)), _Target(None, None, cost))
        elif header.context in self._closed_contexts:
            if eager:
                link.fill(memoryview(bytearray(header.nbytes)), _Target(None, None, cost))
            else:
                self._reply(link, Header(Kind.GONE, header.number))
        else:
            arrival = _Arrival(link, header, bytearray(header.nbytes) if eager else None)
            self._arrived.setdefault(key, []).append(arrival)
            if arrival.data is not None:
                link.fill(memoryview(arrival.data), _Target(None, arrival, 0))

    def _arrive(self, link: Incoming[_Target], target: _Target) -> None:
        """The data of a message is complete."""
        message, arrival, credit = target
        if message is not None:
            self._finish(message)
        if credit:
            self._return_credit(link, credit)
        if arrival is not None:
            arrival.whole = True
            if arrival.taker is not None:
                self._copy(arrival.taker, arrival)
            elif arrival.header.context in self._closed_contexts:
                self._return_credit(link, arrival.header.nbytes + HEADER_BYTES)

    def _lose_link(self, link: Incoming[_Target], error: Disconnected) -> None:
        self._forget(link.socket.fileno())
        link.close()
        if self._incoming.get(link.peer) is link:
            del self._incoming[link.peer]
        # What a sender offered or had begun to send will not come; a message that is here can still be fetched.
        for key, arrivals in list(self._arrived.items()):
            for arrival in [one for one in arrivals if one.link is link and (one.data is None or not one.whole)]:
                self._remove(self._arrived, key, arrival)
        self._lost.setdefault(link.peer, (time.monotonic(), str(error)))

    # The thread -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        nap_precisely()
        while not self._closed:
            if self._driver is not None:
                self._unpark.wait(_PARK)
                continue
            self._step(_TICK if self._pending else _IDLE)

    def _fail_all(self, cause: str = "the thread that moves messages has failed; see its traceback.") -> None:
        with self._lock:
            self._closed = True
            for message in list(self._pending):
                self._broken.setdefault(message.group.context, RingError(cause))
                self._finish(message, RingError(cause))
        self._announce()

    def _step(self, seconds: float) -> None:
        """Wait for something to happen, `seconds` at most, and do what it asks for."""
        ready = self._epoll.poll(min(seconds, _TICK if self._pending else _IDLE))
        try:
            with self._lock:
                if self._closed:
                    return
                for fd, events in ready:
                    self._handle(fd, events)
                now = time.monotonic()
                if now >= self._next_tick:
                    self._next_tick = now + _TICK
                    self._tick(now)
        except BaseException as error:  # a signal handler's, in a caller's thread: bytes may be lost
            cause = f"rank {self.rank}: moving messages was ended by {type(error).__name__}: {error}"
            self._fail_all(cause)
            for context in list(self._groups):
                self._tell_broken(context, RingError(cause))
            raise
        self._announce()

    def _handle(self, fd: int, events: int) -> None:
        if fd == self._kick:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._kick)
            return
        owner = self._files.get(fd)
        if owner is None:
            self._accept()
        elif isinstance(owner, Incoming):
            if events & select.EPOLLOUT:
                self._write_replies(owner)
            if self._files.get(fd) is owner:
                self._read(owner)
        else:
            if owner.link.ready and events & ~select.EPOLLOUT:
                self._read_replies(owner)
            if owner.link.has_unsent():
                self._write(owner)

    def _accept(self) -> None:
        for connected, claim, _ in self._acceptor.poll():
            link: Incoming[_Target] = Incoming(claim.rank, connected)
            old = self._incoming.pop(claim.rank, None)
            if old is not None:
                self._lose_link(old, Disconnected("it connected again"))
            self._lost.pop(claim.rank, None)
            self._incoming[claim.rank] = link
            self._register(connected.fileno(), link, select.EPOLLIN)
            self._read(link)

    def _tick(self, now: float) -> None:
        """Find out which pending messages cannot arrive any more."""
        self._accept()  # drops connections that stay silent
        for peer in self._outgoing.values():
            if peer.link.has_unsent():
                self._write(peer)
        for message in self._doubtful(now):
            try:
                self._check(message, now)
            except Exception as error:
                self._drop(message)
                self._finish(message, error)
        self._ask_senders(now)
        self._publish(now)

    def _doubtful(self, now: float) -> list[Message]:
        """Pending messages that may never arrive. There may be ten thousand, so a look at one must cost little."""
        detector = self._failure_detector
        old = [message for message in self._pending if now - message.since > _YOUNG]
        if detector is not None and (detector.failure() is not None or detector.deadlocks):
            return old
        gone: dict[int, bool] = {}
        found = []
        for message in old:
            rank = -1 if message.peer is None else message.group.ranks[message.peer]
            if rank not in gone:
                has_left = detector is not None and rank >= 0 and detector.has_left(rank)
                gone[rank] = rank < 0 or rank in self._lost or has_left
            if gone[rank] or now - message.since > self._timeout:
                found.append(message)
        return found

    def _ask_senders(self, now: float) -> None:
        """Ask those for whom a receive has waited for long to tell when they close its group."""
        for message in self._pending:
            if message.verb == "receive" and message.peer is not None and now - message.since > _LONG:
                question = message.group.context, message.group.ranks[message.peer]
                if question not in self._asked:
                    self._asked.add(question)
                    self._tell(question[1], Kind.ASK, question[0])

    def _check(self, message: Message, now: float) -> None:
        missing, detector = message.missing(), self._failure_detector
        if detector is not None:
            # What a rank sent before it left is read first. A receive from any rank fails once all have left.
            waits = message.verb == "receive" and any(rank in self._incoming for rank in missing)
            gone = not waits and (len(missing) == 1 or all(map(detector.has_left, missing)))
            detector.check(message.name(), missing if gone else [], message.what())
        waited = now - message.since
        lost = self._lost.get(missing[0]) if len(missing) == 1 else None
        if lost is not None and now - max(lost[0], message.since) > _REASON:
            raise PeerFailed(
                f"rank {self.rank} lost its connection to rank {missing[0]} ({lost[1]}) and waits for it in "
                f"{message.name()}. The rank or its host has ended; look for the error that it printed.",
                missing[0],
            )
        if waited > self._timeout:
            peer = self._outgoing.get(missing[0]) if message.verb == "send" else None
            why = f" ({peer.problem})" if peer is not None and not peer.link.ready and peer.problem else ""
            raise TimeoutExceeded(
                f"{message.name()}: {message.verb} timed out after waiting {self._timeout:g} s for "
                f"{name_ranks(message.missing())}{why}; set RING_TIMEOUT to wait longer."
            )

    def _drop(self, message: Message) -> bool:
        """Take back a receive that has not met its message; returns whether it was one."""
        key = (message.group.context, message.tag)
        if message not in self._posted.get(key, ()):
            return False
        self._remove(self._posted, key, message)
        return True

    def _publish(self, now: float) -> None:
        """Put the longest waits into `long_waits`, from which stall reports and deadlock detection are made."""
        long = (message for message in self._pending if now - message.since > _LONG)
        for message in heapq.nsmallest(_PUBLISHED, long, key=lambda message: message.since):
            missing = tuple(message.missing())
            # Of a receive from any rank nobody knows whom it waits for: it is part of no deadlock.
            blocked = message.blocked_since if message.blocked_since and len(missing) == 1 else now
            name = message.name()
            long_waits[message] = LongWait(name, message.what(), 0, "", missing, message.since, blocked)

    # Closing --------------------------------------------------------------------------------------

    def close_group(self, context: int) -> None:
        """Finish the messages of a group that both ends have started, and drop the others."""
        if not self._closed and context not in self._closed_contexts:
            self._flush(lambda message: message.group.context == context)
        with self._lock:
            self._closed_contexts.add(context)
            for rank in self._askers.pop(context, ()) if not self._closed else ():
                self._tell(rank, Kind.CLOSED, context)
            for message in [one for one in self._pending if one.group.context == context]:
                self._abandon(message)
            for where in (self._posted, self._arrived):
                for key in [key for key in where if key[0] == context]:
                    for arrival in where.pop(key, ()):  # a reply may find a connection lost, and what came over it
                        if not isinstance(arrival, _Arrival):
                            continue
                        if arrival.data is None:
                            self._reply(arrival.link, Header(Kind.GONE, arrival.header.number))
                        elif arrival.whole:
                            self._return_credit(arrival.link, len(arrival.data) + HEADER_BYTES)
        self._announce()

    def _abandon(self, message: Message) -> None:
        if message.verb == "send":
            self._withdraw(message)
        self._finish(message, RingError(f"{message.group.name} was closed before {message.name()} was complete."))

    def _flush(self, concerns: Callable[[Message], bool]) -> None:
        """Wait until data under way has been moved, but not for a peer that moves none."""
        moved, end = -1, 0.0
        while True:
            with self._lock:
                if self._closed or not self._has_data_under_way(concerns):
                    return
                now_moved = sum(peer.link.moved for peer in self._outgoing.values())
                now_moved += sum(link.moved for link in self._incoming.values())
            if now_moved != moved:
                moved, end = now_moved, time.monotonic() + _STALLED
            if time.monotonic() > end or (self._failure_detector is not None and self._failure_detector.aborted):
                return
            time.sleep(0.001)

    def _has_data_under_way(self, concerns: Callable[[Message], bool]) -> bool:
        lost = self._lost
        sending = (m for rank, peer in self._outgoing.items() if rank not in lost for m in peer.link.unsent())
        taken = (message for (rank, _), message in self._taken.items() if rank not in lost)
        targets = [link.item for link in self._incoming.values() if link.item is not None]
        filling = (target.arrival.taker if target.arrival is not None else target.message for target in targets)
        return any(m is not None and not m.done and concerns(m) for part in (sending, taken, filling) for m in part)

    def close(self) -> None:
        """Finish what is under way and close all connections, so that peers can still read what was sent."""
        detector = self._failure_detector
        if not self._closed and not (detector is not None and (detector.failed or detector.aborted)):
            self._flush(lambda message: True)
            self._part()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for message in list(self._pending):
                self._finish(message, RingError(f"{message.group.name} was closed before the message was complete."))
        self._announce()
        os.eventfd_write(self._kick, 1)
        self._unpark.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_LINGER)
        self._release()

    def _part(self) -> None:
        """Close the sending directions and wait until the receivers have closed theirs.

        A TCP connection that is closed with unread answers is reset, which discards what the peer has not read.
        """
        with self._lock:
            for peer in self._outgoing.values():
                if peer.link.ready and peer.link.socket is not None:
                    with contextlib.suppress(OSError):
                        peer.link.socket.shutdown(socket.SHUT_WR)
        end = time.monotonic() + _LINGER
        while time.monotonic() < end:
            with self._lock:
                if not any(peer.link.ready for peer in self._outgoing.values()):
                    return
            time.sleep(0.001)

    def _release(self) -> None:
        for peer in self._outgoing.values():
            peer.link.close()
        for link in self._incoming.values():
            link.close()
        self._acceptor.close()
        with contextlib.suppress(OSError):
            self._epoll.close()
            os.close(self._kick)

    def detach_after_fork(self) -> None:
        """Make every call raise; for a forked child, whose calls would disturb the parent and its peers."""
        self._lock = threading.RLock()
        self._closed = True
        self._pending.clear()
        self._release()


def _closed_by(message: Message, peer: int) -> PeerFailed:
    own = message.group.ranks[message.group.rank]
    return PeerFailed(
        f"rank {peer} closed {message.group.name} before {message.name()} was complete: rank {own} waits in "
        f"{message.text()}, and rank {peer} had not called the other end.",
        peer,
    )


def _mismatch(message: Message, other: int, theirs: str) -> BaseException:
    own = message.group.ranks[message.group.rank]
    return mismatch(message.name(), {own: message.text(), other: theirs})
