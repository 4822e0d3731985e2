"""Tagged messages between any two ranks, at any time: what `send` and `recv` of MPI and torch.distributed need.

The problem. Collectives have fixed members and an order that all of them know. Messages have neither: a receiver may
ask for tag 7 before tag 3, from one rank or from whichever sends first, and two ranks that both send before they
receive must not wait for each other. A program may use a new tag in every step, so a tag must not cost anything that
stays.

The idea is that of MPI, and so are the parts:

- A pair of ranks has one connection for each direction, whatever the tags (net/message_stream.py).
- Small messages are sent eagerly, large ones by rendezvous, and what a receiver keeps is bounded (message_sender.py,
  message_receiver.py).
- Receives and messages are matched by tag and sender, in the order of arrival (message_matching.py).
- A progress engine moves the bytes of all groups of a process: a thread, or a caller that waits (message_progress.py).
- A message that cannot complete ends with the reason (message_watch.py, message_closing.py).

A rank that can no longer take part in a group, because an exception took a message apart, breaks it on all members,
through the failure detector.

Considered and rejected: a communicator of two ranks for each tag (a thread, files and mappings for every new tag); one
for each pair with unlimited room for messages that nobody has asked for (MPI programs that receive in reverse order
would run out of memory); shared memory inside a host (a unix socket moves 1 MiB as fast, and wakes up a rank that
waits).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from ring_plugins.core.base.errors import RingError, fresh
from ring_plugins.core.base.types import Bytes
from ring_plugins.core.collectives.message_closing import ClosedGroups
from ring_plugins.core.collectives.message_progress import LINGER, Progress
from ring_plugins.core.collectives.message_receiver import Receiver
from ring_plugins.core.collectives.message_request import REJECTED_CALL, Message
from ring_plugins.core.collectives.message_sender import Sender
from ring_plugins.core.collectives.message_watch import Watch
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.net.message_stream import Address

#: Seconds without a moved byte after which closing stops waiting for a peer.
_STALLED = 5.0


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
        """End all messages under way and reject further ones; the failure detector calls this for another member."""
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

    def reject(self, verb: Literal["send", "receive"], peer: int, tag: int) -> None:
        """Tell the other end that this one rejected the arguments of a send or receive.

        An empty message takes its place, so the other end finds another size and type. If both reject, they match.
        """
        nothing = np.empty(0, np.uint8)
        (self.send if verb == "send" else self.receive)(nothing, REJECTED_CALL, peer, tag, lambda error: None)

    def wait(self, message: Message, seconds: float | None = None) -> None:
        """Help to move bytes until the message is done, or for `seconds`; it may return earlier."""
        self._messenger.drive(message, seconds)

    def interrupt(self, message: Message, cause: BaseException) -> None:
        """Let go of a message's memory: `cause` ended the wait for it, and the script may use the memory again.

        A send goes on from a copy. A receive ends with an error; if its message was already on the way, that is lost
        and all members reject further messages of the group.
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
        is_used: whether any message has been started.
    """

    def __init__(
        self,
        rank: int,
        secret: bytes,
        near: Iterable[int],
        addresses: Sequence[str] = (),
        failure_detector: FailureDetector | None = None,
    ) -> None:
        self.rank, self.is_used = rank, False
        self._failure_detector = failure_detector
        #: Why groups reject further messages, by context.
        self._broken: dict[int, BaseException] = {}
        self._groups: weakref.WeakValueDictionary[int, MessageGroup] = weakref.WeakValueDictionary()
        lost: dict[int, tuple[float, str]] = {}
        self._progress = Progress(self._tick, self._end_all, self._fail_all)
        self._sender = Sender(rank, secret, near, self._progress, lost)
        self._closed_groups = ClosedGroups(self._sender.tell)
        self._receiver = Receiver(rank, secret, addresses, self._progress, self._closed_groups, lost)
        self._watch = Watch(rank, failure_detector, self._sender, self._receiver, lost)
        self.address = self._receiver.address
        self._progress.start()

    def join(self, group: MessageGroup, addresses: Mapping[int, Address]) -> None:
        """Learn of a group, and where its members listen."""
        with self._progress.lock:
            self._sender.learn(addresses)
            self._groups[group.context] = group
        if self._failure_detector is not None:
            self._failure_detector.watch(group.context, group)

    def start(self, message: Message) -> Message:
        """Start a send or receive.

        Raises:
            RingError: the group is closed or broken.
        """
        context = message.group.context
        with self._progress.lock:
            if context in self._broken:
                raise fresh(self._broken[context])
            if self._progress.closed or self._closed_groups.is_closed(context):
                raise RingError(f"{message.group.name} has been closed.")
            self.is_used = True
            self._progress.pending.add(message)
            if message.verb == "send":
                self._sender.send(message)
            else:
                self._receiver.receive(message)
        self._progress.announce()
        return message

    def drive(self, message: Message, seconds: float | None) -> None:
        """See `MessageGroup.wait`."""
        self._progress.drive(message, seconds)

    def _tick(self, now: float) -> None:
        """Find out which pending messages cannot arrive any more."""
        pending = self._progress.pending
        self._receiver.accept()  # drops connections that stay silent
        self._sender.write_unsent()
        for message in self._watch.doubtful(pending, now):
            try:
                self._watch.check(message, now)
            except Exception as error:
                self._receiver.cancel(message)
                self._progress.finish(message, error)
        self._closed_groups.ask(pending, now)
        self._watch.publish(pending, now)

    # Interrupting and breaking --------------------------------------------------------------------

    def interrupt(self, message: Message, cause: BaseException) -> None:
        """See `MessageGroup.interrupt`."""
        with self._progress.lock:
            if not message.done and message.verb == "send":
                self._sender.copy_unsent(message)
                message.data = memoryview(bytes(message.data))
            elif not message.done:
                self._let_go(message, cause)
        self._progress.announce()

    def _let_go(self, message: Message, cause: BaseException) -> None:
        group = message.group
        text = f"rank {group.ranks[group.rank]} was interrupted in {message.name()} by {type(cause).__name__}"
        if self._receiver.cancel(message):
            self._progress.finish(message, RingError(f"{text} before its message came; receive it again."))
            return
        self._receiver.divert(message)
        error = RingError(
            f"{text}, and the message that was arriving is lost; to continue, all ranks must recreate {group.name}."
        )
        self._broken.setdefault(group.context, error)
        self._progress.finish(message, error)
        self._tell_broken(group.context, error)

    def break_group(self, group: MessageGroup, error: BaseException) -> None:
        """See `MessageGroup.fail`."""
        with self._progress.lock:
            self._broken.setdefault(group.context, error)
            for message in self._pending_in(group.context):
                if message.verb == "send":
                    self._sender.withdraw(message)
                elif not self._receiver.cancel(message):
                    self._receiver.divert(message)
                self._progress.finish(message, fresh(error))
        self._progress.announce()

    def _pending_in(self, context: int) -> list[Message]:
        return [message for message in self._progress.pending if message.group.context == context]

    def _tell_broken(self, context: int, error: BaseException) -> None:
        if self._failure_detector is not None:
            self._failure_detector.break_communicator(context, str(error), ())

    def _fail_all(self, cause: str = "the thread that moves messages has failed; see its traceback.") -> None:
        with self._progress.lock:
            self._progress.closed = True
            for message in list(self._progress.pending):
                self._broken.setdefault(message.group.context, RingError(cause))
                self._progress.finish(message, RingError(cause))
        self._progress.announce()

    def _end_all(self, error: BaseException) -> None:
        """End all messages and break all groups: an exception has ended the moving of bytes, and some may be lost."""
        cause = f"rank {self.rank}: moving messages was ended by {type(error).__name__}: {error}"
        self._fail_all(cause)
        for context in list(self._groups):
            self._tell_broken(context, RingError(cause))

    # Closing --------------------------------------------------------------------------------------

    def close_group(self, context: int) -> None:
        """Finish the messages of a group that both ends have started, and drop the others."""
        if not self._progress.closed and not self._closed_groups.is_closed(context):
            self._flush(lambda message: message.group.context == context)
        with self._progress.lock:
            self._closed_groups.close(context, tell=not self._progress.closed)
            for message in self._pending_in(context):
                if message.verb == "send":
                    self._sender.withdraw(message)
                text = f"{message.group.name} was closed before {message.name()} was complete."
                self._progress.finish(message, RingError(text))
            self._receiver.close_group(context)
        self._progress.announce()

    def _flush(self, concerns: Callable[[Message], bool]) -> None:
        """Wait until data under way has been moved, but not for a peer that moves none."""
        moved, end = -1, 0.0
        while True:
            with self._progress.lock:
                if self._progress.closed or not self._has_data_under_way(concerns):
                    return
                now_moved = self._sender.moved() + self._receiver.moved()
            if now_moved != moved:
                moved, end = now_moved, time.monotonic() + _STALLED
            if time.monotonic() > end or (self._failure_detector is not None and self._failure_detector.aborted):
                return
            time.sleep(0.001)

    def _has_data_under_way(self, concerns: Callable[[Message], bool]) -> bool:
        parts = self._sender.under_way(), self._receiver.under_way()
        return any(not message.done and concerns(message) for part in parts for message in part)

    def close(self) -> None:
        """Finish what is under way and close all connections, so that peers can still read what was sent."""
        detector = self._failure_detector
        if not self._progress.closed and not (detector is not None and (detector.failed or detector.aborted)):
            self._flush(lambda message: True)
            self._part()
        with self._progress.lock:
            if self._progress.closed:
                return
            self._progress.closed = True
            for message in list(self._progress.pending):
                text = f"{message.group.name} was closed before the message was complete."
                self._progress.finish(message, RingError(text))
        self._progress.announce()
        self._progress.stop()
        self._release()

    def _part(self) -> None:
        """Close the sending directions and wait until the receivers have closed theirs.

        A TCP connection that is closed with unread answers is reset, which discards what the peer has not read.
        """
        with self._progress.lock:
            self._sender.shut_down()
        end = time.monotonic() + LINGER
        while time.monotonic() < end:
            with self._progress.lock:
                if not self._sender.is_connected():
                    return
            time.sleep(0.001)

    def _release(self) -> None:
        self._sender.close()
        self._receiver.close()
        self._progress.release()

    def detach_after_fork(self) -> None:
        """Make every call raise; for a forked child, whose calls would disturb the parent and its peers."""
        self._progress.detach_after_fork()
        self._release()
