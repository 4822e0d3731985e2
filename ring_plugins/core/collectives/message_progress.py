"""The progress engine of messages: the thread that moves bytes, and callers that move them instead.

One thread waits for all connections and calls their owners. A caller that waits for a message does the thread's work
itself while it is alone (`drive`), since waking up another thread takes longer than a small message; the thread pauses
meanwhile. A waiting caller does not spin: on cores that other processes use too, that made a round trip of 64 bytes
slower, 430 us instead of 290.

Everything that the engine calls is called with `lock` held, except the callbacks of messages that are done: these may
start further messages, so `announce` calls them without it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.collectives.message_request import Message
from ring_plugins.core.control.wait import long_waits, nap_precisely

T = TypeVar("T")

#: Seconds between two ticks, and between two looks at connections while no message is pending.
_TICK, _IDLE = 0.1, 1.0
#: Seconds that a caller moves the bytes, and that the thread then pauses before it looks whether a caller still does.
_DRIVE, _PARK = 0.02, 0.005
#: Seconds for which closing waits for the thread, and for peers to close their ends.
LINGER = 2.0


class Progress:
    """Waits for connections and calls their owners.

    Args:
        tick: called every now and then with the time, while messages are pending.
        on_error: called without the lock if an exception ended a step, before it is raised further.
        on_death: called if the thread dies in a process that belongs to no job.

    Attributes:
        lock: guards all state of messages.
        pending: messages that are not done.
        closed: whether nothing is moved any more.
    """

    def __init__(
        self,
        tick: Callable[[float], None],
        on_error: Callable[[BaseException], None],
        on_death: Callable[[], None],
    ) -> None:
        self.lock = threading.RLock()
        self.pending: set[Message] = set()
        self.closed = False
        self._tick, self._on_error = tick, on_error
        self._done: list[Message] = []
        #: The message that a caller waits for while it moves the bytes, and its thread.
        self._driver: tuple[Message, int] | None = None
        self._unpark = threading.Event()
        self._next_tick = 0.0
        self._epoll = select.epoll()
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._kick, select.EPOLLIN)
        #: What each file in the selector belongs to, and what is called with that and the file's events.
        self._files: dict[int, tuple[Any, Callable[[Any, int], None]]] = {}
        self._thread = HelperThread(self._serve, "ring:messages", outside_a_job=on_death)

    def start(self) -> None:
        self._thread.start()

    # Connections ----------------------------------------------------------------------------------

    def register(self, fd: int, owner: T, events: int, handle: Callable[[T, int], None]) -> None:
        """Call `handle(owner, events)` when a file is ready for `events`; replaces what was registered for it."""
        if self.owner(fd) is not owner:
            with contextlib.suppress(FileNotFoundError):
                self._epoll.unregister(fd)
            self._files[fd] = owner, handle
            self._epoll.register(fd, events)
            return
        try:
            self._epoll.modify(fd, events)
        except FileNotFoundError:  # a new socket of the same owner that got the number of its old one
            self._epoll.register(fd, events)

    def owner(self, fd: int) -> object:
        entry = self._files.get(fd)
        return None if entry is None else entry[0]

    def forget(self, fd: int) -> None:
        self._files.pop(fd, None)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)

    # Messages -------------------------------------------------------------------------------------

    def finish(self, message: Message, error: BaseException | None = None) -> None:
        """End a message; `announce` tells its owner."""
        if not message.done:
            message.error, message.done = error, True
            self.pending.discard(message)
            long_waits.pop(message, None)
            self._done.append(message)

    def announce(self) -> None:
        """Tell the owners of messages that are done; without the lock, since they may start further ones."""
        while self._done:
            with self.lock:
                done, self._done = self._done, []
            driver = self._driver
            for message in done:
                message.finished(message.error)
                if driver is not None and message is driver[0] and driver[1] != threading.get_ident():
                    os.eventfd_write(self._kick, 1)

    def drive(self, message: Message, seconds: float | None) -> None:
        """Move bytes in the caller's thread until the message is done, but only for as long as that pays."""
        with self.lock:
            if self._driver is not None or message.done or self.closed:
                return
            self._driver = message, threading.get_ident()
            self._unpark.clear()
        end = time.monotonic() + (_DRIVE if seconds is None else min(seconds, _DRIVE))
        try:
            while not message.done and (left := end - time.monotonic()) > 0:
                self._step(left)
        finally:
            with self.lock:
                self._driver = None
                if self.pending:
                    self._unpark.set()

    # The thread -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        nap_precisely()
        while not self.closed:
            if self._driver is not None:
                self._unpark.wait(_PARK)
                continue
            self._step(_TICK if self.pending else _IDLE)

    def _step(self, seconds: float) -> None:
        """Wait for something to happen, `seconds` at most, and do what it asks for."""
        ready = self._epoll.poll(min(seconds, _TICK if self.pending else _IDLE))
        try:
            with self.lock:
                if self.closed:
                    return
                for fd, events in ready:
                    self._handle(fd, events)
                now = time.monotonic()
                if now >= self._next_tick:
                    self._next_tick = now + _TICK
                    self._tick(now)
        except BaseException as error:  # a signal handler's, in a caller's thread: bytes may be lost
            self._on_error(error)
            raise
        self.announce()

    def _handle(self, fd: int, events: int) -> None:
        if fd == self._kick:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._kick)
        elif (entry := self._files.get(fd)) is not None:
            owner, handle = entry
            handle(owner, events)

    # Closing --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Let the thread end, once `closed` is set."""
        os.eventfd_write(self._kick, 1)
        self._unpark.set()
        if self._thread is not threading.current_thread():
            self._thread.join(LINGER)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._epoll.close()
            os.close(self._kick)

    def detach_after_fork(self) -> None:
        """Move nothing any more; for a forked child, in which another thread may have held the lock."""
        self.lock = threading.RLock()
        self.closed = True
        self.pending.clear()
