"""Accepts connections and authenticates them, without ever blocking.

Unauthenticated connections are bounded in number and time. An error on a connection closes only that connection. On
unix sockets the kernel also reports the user (SO_PEERCRED), and other users are rejected. The bootstrap, whose secret
may be empty, also rejects other users of this host on TCP connections (sockets.py). auth.py describes the
handshake and what it protects against.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from ring_plugins.core.base.log import logger
from ring_plugins.core.net.auth import HANDSHAKE_SECONDS, Claim, Purpose, ServerHandshake, WrongSecret, advance
from ring_plugins.core.net.sockets import is_same_unix_user

#: Connections accepted at once, so that a flood of them cannot keep the caller from its other work.
_ACCEPT_AT_ONCE = 64
#: Seconds without accepting after the process ran out of files; the kernel keeps connections waiting meanwhile.
_PAUSE = 0.2
#: Between two looks at the kernel's table of connections, how many times longer than the processor took for one.
_IDENTIFY_PAUSE = 10


class Authenticated(NamedTuple):
    """A connection whose client has proved its claim; its socket does not block."""

    socket: socket.socket
    claim: Claim
    address: str


class _Unauthenticated(NamedTuple):
    socket: socket.socket
    handshake: ServerHandshake
    address: str
    deadline: float


class Acceptor:
    """Accepts connections on any number of listening sockets and authenticates them, without ever blocking.

    It has its own selector; `fileno` lets the owner register that with another selector.

    Args:
        secret, purpose: as for `ClientHandshake`.
        expects: returns whether to accept a proved claim; by default always.
        limit: unauthenticated connections kept; beyond it the oldest is dropped. Choose it larger than the number
            of clients that may connect at once.
        on_wrong_secret: called with the address of a client that does not know the secret.
        are_own: says which connections on TCP sockets to accept, once their clients have proved their claim; None for
            all. For jobs that may have no secret.

    Attributes:
        limit: as above; may be changed.
    """

    def __init__(
        self,
        secret: bytes,
        purpose: Purpose,
        expects: Callable[[Claim], bool] = lambda claim: True,
        limit: int = 256,
        on_wrong_secret: Callable[[str], None] = lambda address: None,
        are_own: Callable[[Sequence[socket.socket]], list[bool]] | None = None,
    ) -> None:
        self._secret, self._purpose, self._expects = secret, purpose, expects
        self._are_own = are_own
        self.limit, self._on_wrong_secret = limit, on_wrong_secret
        self._selector = selectors.EpollSelector()
        self._listeners: list[socket.socket] = []
        #: By socket, the oldest first.
        self._waiting: dict[socket.socket, _Unauthenticated] = {}
        self._found: list[Authenticated] = []
        #: Of TCP sockets whose user is not known yet, the oldest first.
        self._unidentified: list[Authenticated] = []
        self._identify_at = 0.0
        self._resume_at = 0.0
        self._has_warned = False

    def add(self, listener: socket.socket) -> None:
        """Accept on a listening socket, which belongs to the acceptor from now on."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ)

    def remove(self, listener: socket.socket) -> None:
        """Stop listening on a socket, and close it."""
        self._listeners.remove(listener)
        with contextlib.suppress(KeyError):
            self._selector.unregister(listener)
        listener.close()

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self._selector.fileno()

    def waiting(self) -> int:
        """Number of connections that have not authenticated themselves."""
        return len(self._waiting)

    def poll(self, seconds: float = 0.0) -> list[Authenticated]:
        """Accept and authenticate connections; wait `seconds` at most for activity.

        Call it about once a second even when nothing happens: it drops connections that took too long.
        """
        if self._resume_at and time.monotonic() >= self._resume_at:
            self._resume_at = 0.0
            for listener in self._listeners:
                with contextlib.suppress(KeyError):  # added meanwhile
                    self._selector.register(listener, selectors.EVENT_READ)
        for key, _ in self._selector.select(self._bounded(seconds)):
            ready = cast("socket.socket", key.fileobj)
            if key.data is None:
                self._accept(ready)
            elif ready in self._waiting:
                self._advance(key.data)
        now = time.monotonic()
        while self._waiting and (oldest := next(iter(self._waiting.values()))).deadline <= now:
            self._drop(oldest)
        self._identify()
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        """Close everything.

        A forked child may call it: it unregisters nothing, since the kernel's side of a selector is the parent's too.
        """
        for open_socket in [*self._listeners, *self._waiting, *(client.socket for client in self._unidentified)]:
            open_socket.close()
        self._listeners.clear()
        self._waiting.clear()
        self._unidentified.clear()
        self._selector.close()

    def _bounded(self, seconds: float) -> float:
        now = time.monotonic()
        if self._resume_at:
            seconds = min(seconds, self._resume_at - now)
        if self._waiting:
            seconds = min(seconds, next(iter(self._waiting.values())).deadline - now)
        if self._unidentified:
            seconds = min(seconds, self._identify_at - now)
        return max(seconds, 0.0)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                connected, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in (errno.ECONNABORTED, errno.EPROTO):
                    continue  # the client has gone already
                self._pause(error)
                return
            try:
                self._begin(connected, address)
            except OSError:  # no more memory in the kernel for one socket's options or its place in the selector
                self._waiting.pop(connected, None)
                connected.close()

    def _begin(self, connected: socket.socket, address: Any) -> None:
        connected.setblocking(False)
        if not is_same_unix_user(connected):
            connected.close()
            return
        if len(self._waiting) >= self.limit:
            self._drop(next(iter(self._waiting.values())))
        name = str(address[0]).removeprefix("::ffff:") if isinstance(address, tuple) else "this host"
        handshake = ServerHandshake(self._secret, self._purpose, self._expects)
        new = _Unauthenticated(connected, handshake, name, time.monotonic() + HANDSHAKE_SECONDS)
        self._selector.register(connected, selectors.EVENT_READ, new)
        self._waiting[connected] = new
        self._advance(new)  # sends the challenge; a quick client has answered it by then

    def _advance(self, client: _Unauthenticated) -> None:
        try:
            if not advance(client.socket, client.handshake):
                return
        except Exception as error:  # whatever bytes arrive, they affect only their own connection
            self._drop(client)
            if isinstance(error, WrongSecret):
                self._on_wrong_secret(client.address)
            return
        del self._waiting[client.socket]
        self._selector.unregister(client.socket)
        found = Authenticated(client.socket, client.handshake.claim, client.address)
        if self._are_own is None:
            self._found.append(found)
            return
        self._unidentified.append(found)
        if len(self._unidentified) >= self.limit:  # all at once, since the oldest may be a rank of the job
            self._identify_at = 0.0
            self._identify()

    def _identify(self) -> None:
        """Find those that this user has connected, and close others.

        That reads a table of all connections of this host, which takes milliseconds. So strangers cannot have it read
        before the handshake, and after it for a small share of the time only, for all of them at once.
        """
        if self._are_own is None or not self._unidentified or time.monotonic() < self._identify_at:
            return
        began = time.thread_time()  # not the time for which others had the core
        clients = list(self._unidentified)
        are_own = self._are_own([client.socket for client in clients])
        self._unidentified.clear()
        for client, is_own in zip(clients, are_own, strict=True):
            self._found.append(client) if is_own else client.socket.close()
        self._identify_at = time.monotonic() + _IDENTIFY_PAUSE * (time.thread_time() - began)

    def _drop(self, client: _Unauthenticated) -> None:
        del self._waiting[client.socket]
        self._selector.unregister(client.socket)
        client.socket.close()

    def _pause(self, error: OSError) -> None:
        """Accept nothing for a moment: a listening socket stays readable while accepting fails."""
        for listener in self._listeners:
            with contextlib.suppress(KeyError):
                self._selector.unregister(listener)
        self._resume_at = time.monotonic() + _PAUSE
        if self._waiting:
            self._drop(next(iter(self._waiting.values())))
        if error.errno in (errno.EMFILE, errno.ENFILE) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"process {os.getpid()} cannot accept connections of its job: {error.strerror}. It goes on as soon as "
                "files are closed; raise the limit (ulimit -n)."
            )
