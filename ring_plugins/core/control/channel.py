"""Small messages between the ranks of a job, beside the data.

A message is `[kind, body]` in JSON. Which ranks are connected depends on what the job does when one is lost:

- The job ends: each rank is connected to rank 0 only (rank_zero.py), which passes on what concerns all. A thousand
  ranks have a thousand connections. They are made in the background; messages wait until theirs is made.
- The job goes on, possibly without rank 0: each rank is connected to every other (mesh.py).

Either end sends "goodbye" before it closes a connection; one that ends without it is a failure.

**Threads.** The channel's own thread moves the messages (core/net/peers.py). It also calls the handlers that are
registered with `at_once`: those of failures and agreements, whose milliseconds count, and which never wait. All other
handlers run in `poll`, on the monitor thread: those of reports, which may look at /proc or write files. Nothing waits
for a message: a channel that is slow or broken costs the job its reports, never a step.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ring_plugins.core.base.log import logger
from ring_plugins.core.base.threads import HelperThread, until
from ring_plugins.core.control.rank_zero import GOODBYE, RankZero
from ring_plugins.core.net.acceptor import Authenticated
from ring_plugins.core.net.auth import Disconnected, Purpose
from ring_plugins.core.net.frames import FrameSocket, from_json, to_json
from ring_plugins.core.net.peers import Peers
from ring_plugins.core.net.sockets import enable_keepalive

#: Messages that may wait for a connection; beyond it the oldest are dropped.
MOST_QUEUED = 1000
#: Messages that may wait for `poll`; beyond it droppable ones are dropped.
MOST_UNREAD = 10_000
#: Seconds for which `close` waits for a connection that is being made, and until the others have read what was sent.
_LAST_CHANCE, _LINGER = 0.5, 1.0
#: Seconds for which the thread sleeps at most.
_IDLE = 1.0

Body = dict[str, Any]
#: Called with the rank that sent a message, and its body.
Handler = Callable[[int, Body], object]
#: Returns the connection to rank 0, or None if it gives up; takes what says that this rank leaves.
Connect = Callable[[Callable[[], bool]], FrameSocket | None]

#: In place of a rank: all others that are connected, or are expected to be.
EVERYONE = -1


class Watcher(Protocol):
    """Decides what the end of a connection means; called on the channel's thread, which holds `peers.lock`."""

    def note_end(self, rank: int, how: Disconnected) -> None:
        """The connection to a rank has ended."""

    def look(self) -> float:
        """Do what is due, after each turn of the loop; returns in how many seconds the next is."""


class Channel:
    """One rank's messages to the others and from them. Any thread may send.

    Args:
        rank: of this process.
        size: of the job.
        rank_zero: on rank 0, where the others connect, if they do so in the background.
        connect: on the others, makes that connection.

    Attributes:
        peers: the connections, by rank.
        connected: ranks that are connected, as far as `poll` has come.
        leader: the rank to which reports go.
        is_abandoned: whether this process was forked from the rank.
    """

    def __init__(self, rank: int, size: int, rank_zero: RankZero | None = None, connect: Connect | None = None) -> None:
        self.rank, self.size, self.leader = rank, size, 0
        self.connected: set[int] = set()
        expected = range(1, size) if rank_zero is not None else [0] if connect is not None else []
        #: For ranks that have not connected yet: one that did not hear of a failure would wait for ever.
        self._queued = {other: deque[bytes](maxlen=MOST_QUEUED) for other in expected}
        self.peers = Peers(rank_zero.acceptor(self._is_connected) if rank_zero is not None else None)
        self._connect = connect
        self._handlers: dict[str, tuple[Handler, bool]] = {}
        self._failed_handlers: set[str] = set()
        self._droppable: set[str] = set()
        self._on_joined: list[Callable[[int], object]] = []
        self._on_end: list[Callable[[int, Disconnected | None], object]] = []
        self._watcher: Watcher | None = None
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._closing_since = 0.0
        self.is_abandoned = False
        self._thread = HelperThread(self._run, "ring:channel")

    def on(self, kind: str, handler: Handler, at_once: bool = False, droppable: bool = False) -> None:
        """Call `handler` with every message of this kind.

        Args:
            kind, handler: of which messages, and what to call.
            at_once: whether the channel's thread calls it, or this rank itself in `tell`. An exception then counts as
                an invalid message, and ends the connection to its sender.
            droppable: whether messages may be dropped while `poll` is not called, such as in a monitor thread that
                writes to a file system that hangs.
        """
        self._handlers[kind] = handler, at_once
        if droppable:
            self._droppable.add(kind)

    def on_joined(self, handler: Callable[[int], object]) -> None:
        """Have `poll` call `handler` with each rank that has been connected."""
        self._on_joined.append(handler)

    def on_end(self, handler: Callable[[int, Disconnected | None], object]) -> None:
        """Have `poll` call `handler` with each rank whose connection has ended, and the reason; None for a goodbye.

        A channel that is watched tells its watcher instead.
        """
        self._on_end.append(handler)

    def watch(self, watcher: Watcher) -> None:
        """Let `watcher` know of ends, on the channel's thread."""
        self._watcher = watcher

    def start(self) -> None:
        """Begin to move messages."""
        self._thread.start()

    # Called by any thread -------------------------------------------------------------------------

    def tell(self, rank: int, kind: str, body: Body | None = None, *, droppable: bool = False) -> None:
        """Send a message.

        Args:
            rank: to whom: one that is connected to this rank, or is expected to be; this rank itself; or `EVERYONE`.
            kind: selects the handler.
            body: values that JSON can hold.
            droppable: whether it may be dropped when the network is too slow.

        Raises:
            TypeError: a handler took `rank` from a message that no release of ours sends.
        """
        if not isinstance(rank, int):
            raise TypeError(f"{rank!r} is not a rank")
        if rank == self.rank:
            self._dispatch(rank, kind, body or {})
            return
        message = to_json([kind, body or {}])
        with self.peers.lock:
            for other in [*self.peers, *self._queued] if rank == EVERYONE else [rank]:
                if other in self._queued:
                    self._queued[other].append(message)
                else:
                    self.peers.send(other, message, droppable)

    def add(self, rank: int, frames: FrameSocket) -> None:
        """Exchange messages with a rank over this connection, which has authenticated itself."""
        with self.peers.lock:
            self.peers.add(rank, frames)
            self._begin_to_send(rank)

    def _begin_to_send(self, rank: int) -> None:
        for message in self._queued.pop(rank, ()):
            self.peers.send(rank, message)
        self._inbox.put(partial(self._note_joined, rank))

    def _is_connected(self, rank: int) -> bool:
        return rank in self.peers and rank not in self._queued

    def reaches(self, rank: int) -> bool:
        """Whether messages to a rank arrive, as far as is known, or wait for its connection."""
        return rank == self.rank or rank in self.peers or rank in self._queued

    def hang_up(self, rank: int) -> None:
        """Close a connection now: nothing more of that rank counts."""
        self.peers.hang_up(rank)
        self._inbox.put(partial(self.connected.discard, rank))

    def flush(self, seconds: float) -> bool:
        """Wait until everything is sent; returns whether it is."""
        end = time.monotonic() + seconds
        # Rank 0 would else hear of its end, not of the cause.
        is_connected = until(lambda: self._connect is None or not self._queued, seconds)
        return is_connected and self.peers.flush(end - time.monotonic())

    def wake(self) -> None:
        """Let `poll` return."""
        self._inbox.put(lambda: None)

    # Called by the monitor thread -----------------------------------------------------------------

    def poll(self, seconds: float) -> None:
        """Call the handlers of what has arrived; returns after `seconds` at the latest, or when something has."""
        try:
            self._inbox.get(timeout=max(seconds, 0.0001))()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def close(self) -> None:
        """Send goodbye and what was told before, and close."""
        if self._closing_since:
            return
        self._closing_since = time.monotonic()
        self.peers.wake()
        if self._thread.is_alive():
            self._thread.join(_LAST_CHANCE + _LINGER + 1.0)
        elif self._thread.ident is None:
            self.peers.abandon()

    def abandon(self) -> None:
        """Close all sockets without a goodbye, as a forked child must."""
        self.is_abandoned = True
        self._closing_since = self._closing_since or time.monotonic()
        self.peers.abandon()

    def _note_joined(self, rank: int) -> None:
        self.connected.add(rank)
        for handler in self._on_joined:
            handler(rank)

    def _note_ended(self, rank: int, how: Disconnected | None) -> None:
        for handler in self._on_end:
            handler(rank, how)

    def _handle(self, handler: Handler, sender: int, kind: str, body: Body) -> None:
        try:
            handler(sender, body)
        except Exception:  # an error in a report must not end the monitor thread
            if kind not in self._failed_handlers:
                self._failed_handlers.add(kind)
                logger.exception(f'rank {self.rank}: handling the message "{kind}" of rank {sender} failed')

    # The thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._connect is not None:
            frames = self._connect(lambda: 0 < self._closing_since < time.monotonic() - _LAST_CHANCE)
            with self.peers.lock:
                self.add(0, frames) if frames is not None else self._queued.clear()
        due = 0.0
        while not self._closing_since:
            due = self.turn(due)
        with self.peers.lock:
            for rank in self.peers:
                self.peers.send(rank, to_json(GOODBYE))
        self.peers.close(_LINGER)

    def turn(self, seconds: float) -> float:
        """Move what can be moved, after waiting at most `seconds` for it; returns the seconds until the next turn."""
        ready = self.peers.wait(seconds)
        with self.peers.lock:
            for new in self.peers.accepted():
                self._accept(new)
            for rank, event in self.peers.events(ready):
                self._end(rank, event) if isinstance(event, Disconnected) else self.receive(rank, event)
            return self._watcher.look() if self._watcher is not None else _IDLE

    def _accept(self, new: Authenticated) -> None:
        if self._is_connected(new.claim.rank):  # a rank that connected twice at once
            new.socket.close()
            return
        enable_keepalive(new.socket)
        self.peers.add(new.claim.rank, FrameSocket(new.socket, Purpose.CONTROL))  # counts from its first message on

    def receive(self, rank: int, data: bytes) -> None:
        """Take a message of a rank; called with the lock."""
        if rank in self._queued:
            self._begin_to_send(rank)
        try:
            message = from_json(data)
            if message == GOODBYE:
                self._end(rank, None)
                return
            kind, body = message
            if not isinstance(kind, str) or not isinstance(body, dict):
                raise TypeError("not a kind and a body")
            self._dispatch(rank, kind, body)
        except Exception as error:  # what one rank sends must not end this one's thread, on which all others rely
            how = Disconnected(f"it sent an invalid message: {data[:200]!r}", is_invalid=True)
            how.__cause__ = error
            self._end(rank, how)

    def _dispatch(self, sender: int, kind: str, body: Body) -> None:
        handler, at_once = self._handlers.get(kind, (None, False))
        if handler is None:
            return
        if at_once:
            with self.peers.lock:
                handler(sender, body)
        elif kind not in self._droppable or self._inbox.qsize() < MOST_UNREAD:
            self._inbox.put(partial(self._handle, handler, sender, kind, body))

    def _end(self, rank: int, how: Disconnected | None) -> None:
        self.hang_up(rank)
        if rank in self._queued:  # it has said nothing yet, and connects again
            return
        if self._watcher is not None:
            self._watcher.note_end(rank, how or Disconnected("it closed the connection"))
        else:
            self._inbox.put(partial(self._note_ended, rank, how))
