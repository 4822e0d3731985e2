"""Messages on an authenticated connection: a length, then that many bytes.

Nothing here runs before the handshake of `auth.py` has succeeded. `reach` makes the client end of such a connection,
for ranks that join rank 0, supervisors, and whoever else talks to one process only: it connects, proves itself, and
tries again. Those who talk to many use `peers.py`.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from ring_plugins.core.base.threads import until
from ring_plugins.core.net.auth import (
    Claim,
    ClientHandshake,
    Disconnected,
    Handshake,
    Purpose,
    Rejected,
    authenticate,
    wait_for,
)
from ring_plugins.core.net.sockets import UNIX, configure, connect_here

#: Bytes of the longest message. The sender is authenticated, so this catches mistakes, not attacks. A message of the
#: bootstrap holds every rank's payload; the launcher carries a user's functions and results, as large as they may be.
#: What is probed carries none.
_LONGEST = {Purpose.CONTROL: 1 << 24, Purpose.BOOTSTRAP: 1 << 28, Purpose.LAUNCHER: 1 << 40, Purpose.PROBE: 0}

_LENGTH = struct.Struct("!Q")
#: Bytes of one read, and buffers of one write.
_READ, _WRITE_AT_ONCE = 1 << 18, 16


class FrameSocket:
    """Messages on an authenticated connection, each a length and that many bytes.

    Only `flush` and `receive` block. Large messages are not copied on their way out.

    Args:
        connected: the connection.
        purpose: of it; bounds the size of messages.
        longest: a smaller bound, until `allow_longest`.
    """

    def __init__(self, connected: socket.socket, purpose: Purpose, longest: int = 1 << 63) -> None:
        connected.setblocking(False)
        configure(connected)
        self.socket, self.fileno = connected, connected.fileno  # for selectors
        #: Bytes that wait to be sent.
        self.unsent = 0
        self._purpose = purpose
        self._longest = min(longest, _LONGEST[purpose])
        self._outgoing: deque[memoryview] = deque()
        self._incoming = bytearray()
        self._received: deque[bytes] = deque()
        #: Why sending failed first: the kernel tells an error once, to whoever reads or writes next.
        self._end: Disconnected | None = None

    def allow_longest(self) -> None:
        """Accept messages as long as the purpose allows."""
        self._longest = _LONGEST[self._purpose]

    def send(self, message: bytes) -> None:
        """Queue a message; `write` or `flush` sends it."""
        header = _LENGTH.pack(len(message))
        parts = [header + message] if len(message) < _READ else [header, message]
        self._outgoing += map(memoryview, parts)
        self.unsent += len(header) + len(message)

    def write(self) -> None:
        """Send what the kernel accepts now.

        Raises:
            Disconnected: the connection is lost.
        """
        parts = self._outgoing
        while parts:
            try:
                sent = self.socket.sendmsg([*islice(parts, _WRITE_AT_ONCE)])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end = self._end or Disconnected.by(error)
                raise self._end from error
            self.unsent -= sent
            while parts and sent >= len(parts[0]):
                sent -= len(parts.popleft())
            if sent:
                parts[0] = parts[0][sent:]

    def read(self) -> list[bytes]:
        """All messages that have arrived completely.

        Raises:
            Disconnected: the other side closed, or sent an invalid message; earlier messages have been returned.
        """
        end: Disconnected | None = None
        try:
            while data := self.socket.recv(_READ):
                self._incoming += data
            end = Disconnected("it closed the connection")
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            end = Disconnected.by(error)
        messages = self._whole_messages()
        if end is not None and not messages:
            raise self._end or end
        return messages  # the next call raises

    def _whole_messages(self) -> list[bytes]:
        messages: list[bytes] = []
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > self._longest:
                if messages:
                    break  # the next call raises
                text = f"it sent a message of {length} bytes, and {self._longest} are allowed"
                raise Disconnected(text, is_invalid=True)
            end = _LENGTH.size + length
            if len(self._incoming) < end:
                break
            with memoryview(self._incoming) as view:
                messages.append(bytes(view[_LENGTH.size : end]))
            del self._incoming[:end]
        return messages

    def flush(self, seconds: float | None = None) -> None:
        """Wait until everything is sent, for `seconds` at most.

        Raises:
            Disconnected: the connection is lost.
            TimeoutError: the other side did not take it in time.
        """
        end = time.monotonic() + seconds if seconds is not None else float("inf")
        self.write()
        while self.unsent:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError("the other side takes no more bytes")
            wait_for(self.socket, select.POLLOUT, min(left, 60.0))
            self.write()

    def say(self, message: bytes, seconds: float | None = None) -> None:
        """Send a message now; see `flush`."""
        self.send(message)
        self.flush(seconds)

    def receive(self, seconds: float) -> bytes | None:
        """The next message, or None if none arrives within `seconds`.

        Raises:
            Disconnected: see `read`.
        """
        end = time.monotonic() + seconds
        while not self._received:
            self._received += self.read()
            if not self._received and not wait_for(self.socket, select.POLLIN, end - time.monotonic()):
                return None
        return self._received.popleft()

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


class Unreached(Disconnected):
    """No place has answered in time; the text names each, and why.

    Attributes:
        error: of the first place that has rejected this process, else of the last place.
    """

    def __init__(self, problems: Sequence[str], error: Exception) -> None:
        super().__init__("; ".join(problems))
        self.error = error


def reach(
    places: Callable[[], Iterable[tuple[str, int]]],
    secret: bytes,
    purpose: Purpose,
    claim: Claim,
    seconds: float,
    gives_up: Callable[[Unreached], bool] = lambda why: True,
    pause: float = 0.05,
    source: str = "",
    check: Callable[[socket.socket, Handshake], object] = lambda connected, handshake: None,
) -> FrameSocket:
    """The client end of a connection to the first of some places that answers as a part of this job.

    Args:
        places: returns addresses and ports, the likeliest first; the name of a unix socket stands after `UNIX`.
        secret, purpose, claim: as for `ClientHandshake`.
        seconds: for each place; also for which a place may drop connections, as an acceptor does that has too many.
        gives_up: called after each round over all places in vain with the reasons; whether to end.
        pause: seconds before the next round.
        source: address to connect from, "" for any.
        check: called before the handshake; may raise.

    Raises:
        Unreached: it has given up.
    """
    began = time.monotonic()
    while True:
        problems, error = list[str](), Exception()
        try:
            for address, port in places():
                try:
                    handshake = ClientHandshake(secret, purpose, claim)
                    return FrameSocket(_connect(address, port, handshake, seconds, source, check), purpose)
                except (OSError, Disconnected) as why:
                    problems.append(f"{address}:{port}: {getattr(why, 'strerror', None) or why}")
                    error = error if isinstance(error, Rejected) else why
        except OSError as why:  # of a name that does not resolve
            error = why
        is_dropped = type(error) is Disconnected and time.monotonic() - began < seconds
        if not is_dropped and gives_up(failed := Unreached(problems, error)):
            raise failed from error
        time.sleep(pause)


def _connect(
    address: str, port: int, handshake: Handshake, seconds: float, source: str, check: Callable[..., object]
) -> socket.socket:
    end = time.monotonic() + seconds
    if address.startswith(UNIX):
        connected = connect_here(address.removeprefix(UNIX))
    else:
        connected = socket.create_connection((address, port), max(seconds, 0.01), (source, 0) if source else None)
    try:
        check(connected, handshake)
        authenticate(connected, handshake, end - time.monotonic())
    except BaseException:
        connected.close()
        raise
    return connected


def close_when_read(connections: Sequence[FrameSocket], seconds: float) -> None:
    """Close connections so that the others can read what was sent last; see `ConnectionGroup.close` in tcp.py.

    Args:
        connections: whose messages nobody reads here any more.
        seconds: for which this waits, at most.
    """
    end = time.monotonic() + seconds
    for connection in connections:
        with contextlib.suppress(Disconnected, OSError, TimeoutError):
            connection.flush(max(end - time.monotonic(), 0.01))
            connection.socket.shutdown(socket.SHUT_WR)
    until(lambda: not [one for one in connections if not _has_ended(one)], end - time.monotonic())
    for connection in connections:
        connection.close()


def _has_ended(connection: FrameSocket) -> bool:
    """Read a connection without looking at what comes; whether it has ended, and is closed now."""
    try:
        connection.read()
    except Disconnected:
        connection.close()
        return True
    return False


def to_json(message: Any) -> bytes:
    """A message as bytes."""
    return json.dumps(message, separators=(",", ":")).encode()


def from_json(data: bytes) -> Any:
    """The message that bytes hold.

    Raises:
        Disconnected: they are not JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Disconnected("it sent an invalid message", is_invalid=True) from error
