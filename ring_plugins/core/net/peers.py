"""The message loop: authenticated connections to numbered peers, each carrying whole messages.

Everything of a job that talks in messages does so through `Peers`: the ranks with each other (core/control/channel.py),
rank 0 with those that come (core/rendezvous/bootstrap.py), and a launcher with what it started. The owner calls it in
turns, each of which accepts, reads and writes whatever is possible without waiting:

    ready = peers.wait(seconds)
    with peers.lock:  # if other threads use them
        for new in peers.accepted():
            peers.add(new.claim.rank, FrameSocket(new.socket, purpose))
        for number, event in peers.events(ready):
            ...  # bytes: a message; Disconnected: the end of this peer, and why

Any thread may send. What it sends leaves at once as far as the kernel takes it; the loop sends the rest. So `send`
never waits, and whoever must know that everything has left calls `flush`.

**Order.** The messages of a peer come in order, and its end comes after its last message, even if sending to it has
failed meanwhile: what a peer said before it ended may say why. After `hang_up` nothing more of that peer counts, though
it may have been read already.

**Strangers.** Connections come from an `Acceptor`, which parses nothing before the handshake, or have been
authenticated by the owner. A message that is too long, or an error of the kernel, ends only its own connection.

**Forks.** The kernel's side of a selector is shared with the parent, so `abandon` closes sockets in a forked child and
unregisters nothing.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator, Sequence

from ring_plugins.core.base.threads import until
from ring_plugins.core.net.acceptor import Acceptor, Authenticated
from ring_plugins.core.net.auth import Disconnected
from ring_plugins.core.net.frames import FrameSocket, close_when_read

#: Bytes that may wait to be sent to one peer; beyond it droppable messages are dropped.
_MOST_UNSENT = 1 << 22

#: A message of a peer, or how its connection has ended.
Event = bytes | Disconnected


class Peers:
    """Connections to peers, each with a number, moved by one thread.

    Args:
        acceptor: of new connections, if any may come.

    Attributes:
        lock: held by whoever uses the connections; the owner holds it while it handles events.
    """

    def __init__(self, acceptor: Acceptor | None = None) -> None:
        self.lock = threading.RLock()
        self._acceptor = acceptor
        self._frames: dict[int, FrameSocket] = {}
        self._writing: set[int] = set()  # whose sockets are to wake the loop once they take more bytes
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._waker = socket.socketpair()
        for end in (self._wake_end, self._waker):
            end.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ)
        if acceptor is not None:
            self._selector.register(acceptor, selectors.EVENT_READ)

    def __contains__(self, number: int) -> bool:
        return number in self._frames

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._frames))

    def add(self, number: int, frames: FrameSocket) -> None:
        """Take over an authenticated connection, in the place of an earlier one to this peer."""
        with self.lock:
            self.hang_up(number)
            self._frames[number] = frames
            self._selector.register(frames, selectors.EVENT_READ, number)
        self.wake()

    def send(self, number: int, message: bytes, droppable: bool = False) -> None:
        """Send a message, unless the connection has ended.

        Args:
            number: of the peer.
            message: to send.
            droppable: whether it may be dropped if too much waits already.
        """
        with self.lock:
            frames = self._frames.get(number)
            if frames is None or (droppable and frames.unsent > _MOST_UNSENT):
                return
            frames.send(message)
            with contextlib.suppress(Disconnected):  # the loop finds it out
                frames.write()
            if frames.unsent:
                self.wake()

    def hang_up(self, number: int) -> None:
        """Close a connection now: nothing more of that peer counts."""
        with self.lock:
            frames = self._frames.pop(number, None)
            self._writing.discard(number)
            if frames is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(frames)
                frames.close()

    def wake(self) -> None:
        """Let `wait` return."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # The loop -------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> list[tuple[int, FrameSocket]]:
        """Sleep until something can be moved; returns what `events` takes. Call it without the lock."""
        ready = []
        for key, _ in self._selector.select(max(seconds, 0.0)):
            if isinstance(key.fileobj, FrameSocket):
                ready.append((key.data, key.fileobj))
            elif key.fileobj is self._wake_end:
                with contextlib.suppress(BlockingIOError):
                    self._wake_end.recv(4096)
        return ready

    def accepted(self) -> list[Authenticated]:
        """New connections; call it about once a second, also because it drops strangers that stay silent."""
        return self._acceptor.poll() if self._acceptor is not None else []

    def stop_accepting(self) -> None:
        """Close the listening sockets, and connections that have not authenticated themselves."""
        if self._acceptor is not None:
            self._selector.unregister(self._acceptor)
            self._acceptor.close()
            self._acceptor = None

    def events(self, ready: Sequence[tuple[int, FrameSocket]]) -> Iterator[tuple[int, Event]]:
        """What has arrived, by peer; then sends what waits. The caller holds the lock."""
        for number, frames in ready:
            yield from self._read(number, frames)
        for number, frames in [(n, one) for n, one in self._frames.items() if one.unsent or n in self._writing]:
            if self._frames.get(number) is frames:
                yield from self._write(number, frames)

    def _read(self, number: int, frames: FrameSocket) -> Iterator[tuple[int, Event]]:
        if self._frames.get(number) is not frames:  # hung up while another peer's message was handled
            return
        try:
            messages = frames.read()
        except Disconnected as how:
            self.hang_up(number)
            yield number, how
            return
        for message in messages:
            yield number, message
            if self._frames.get(number) is not frames:
                return

    def _write(self, number: int, frames: FrameSocket) -> Iterator[tuple[int, Event]]:
        try:
            frames.write()
        except Disconnected as how:
            yield from self._read(number, frames)  # it may have said why it ends
            if self._frames.get(number) is frames:
                self.hang_up(number)
                yield number, how
            return
        if bool(frames.unsent) != (number in self._writing):
            self._writing ^= {number}
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if frames.unsent else 0)
            self._selector.modify(frames, events, number)

    # The end --------------------------------------------------------------------------------------

    def flush(self, seconds: float) -> bool:
        """Send everything that waits; returns whether that was possible in time. Any thread may call it."""

        def is_sent() -> bool:
            with self.lock:
                return not [frames for frames in self._frames.values() if _has_more_to_send(frames)]

        return until(is_sent, seconds)

    def close(self, seconds: float = 0.0) -> None:
        """Close everything once the peers have read what was sent last, for which this waits so long at most.

        Called by the thread that calls `wait`.
        """
        with self.lock:
            last, self._frames = list(self._frames.values()), {}
        if seconds:
            close_when_read(last, seconds)
        for frames in last:
            frames.close()
        self.abandon()

    def abandon(self) -> None:
        """Close all sockets at once, as a forked child must."""
        for frames in self._frames.values():
            frames.close()
        if self._acceptor is not None:
            self._acceptor.close()
        self._wake_end.close()
        self._waker.close()
        self._selector.close()


def _has_more_to_send(frames: FrameSocket) -> bool:
    """Send what the kernel takes now; whether that was not all."""
    with contextlib.suppress(Disconnected):
        frames.write()
        return frames.unsent > 0
    return False
