"""Connections between a driver and its ranks: the driver sends a call and gathers the outcomes.

Ranks of this host inherit one end of a socket pair. Others connect to the driver, and first send their host's name. The
end of a connection shows that the other side is gone. The key travels with the ranks, in the environment or through the
cluster's own channels. A call and its outcome are pickles, which can run any code: nothing is unpickled before both
sides have proved that they know the key (core/net/auth.py).

    driver -> rank   the call, as `outcomes.pack_call` made it
    rank -> driver   the outcome

Ray's actors have the call and the outcome carried by Ray.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import select
import selectors
import socket
import time
from collections.abc import Callable

from ring_plugins.core.base.errors import LaunchError, quoted
from ring_plugins.core.base.progress_line import ProgressLine, arrivals
from ring_plugins.core.net.acceptor import Acceptor, Authenticated
from ring_plugins.core.net.auth import Claim, ClientHandshake, Disconnected, Purpose, Rejected, authenticate
from ring_plugins.core.net.frames import FrameSocket
from ring_plugins.launcher.outcomes import Failure, Outcome, collect

#: Connections that the driver keeps in addition to those of its ranks, and those that wait in the kernel.
_OTHER_CONNECTIONS, _BACKLOG = 64, 1024
#: Seconds for which the driver still waits for outcomes of ranks that have ended, as long as nothing arrives.
_LAST_SECONDS = 2.0
#: Seconds in which a rank must reach the driver.
_CONNECT_SECONDS = 60.0


class Driver:
    """The driver's end. Leaving the context closes all connections, which ends the ranks.

    Args:
        listens: whether ranks connect to it.

    Attributes:
        port: where it listens, at all addresses of this host.
        key: that ranks must know.
    """

    def __init__(self, listens: bool = True) -> None:
        self.key, self.port = secrets.token_bytes(32), 0
        self._ranks = self._most = 0
        self._call = b""
        self._ended: float | None = None
        self._connections: dict[int, _RankConnection] = {}
        self._acceptor = Acceptor(self.key, Purpose.LAUNCHER, self._expects)
        if listens:
            listener = socket.create_server(("0.0.0.0", 0), backlog=_BACKLOG)
            self.port = listener.getsockname()[1]
            self._acceptor.add(listener)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._acceptor, selectors.EVENT_READ)

    def __enter__(self) -> Driver:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._acceptor.close()
        for connection in self._connections.values():
            connection.frames.close()
        self._selector.close()

    def add(self, rank: int, connected: socket.socket, why_it_ended: Callable[[], Failure]) -> None:
        """Add the connection of a process of this host, which is a rank.

        Args:
            rank: of the process.
            connected: this end of the connection.
            why_it_ended: waits for the end of the process.
        """
        self._watch(_RankConnection(rank, connected, socket.gethostname(), why_it_ended))

    def outcomes(
        self,
        packed: bytes,
        ranks: int,
        trouble: Callable[[], str | None],
        timeout: float | None,
        most: int = 0,
        recovers: bool = False,
    ) -> list[Outcome]:
        """Send the call to every rank that was added or connects, and gather the outcomes in the order of arrival.

        Args:
            packed: from `outcomes.pack_call`.
            ranks: number of ranks that will connect.
            trouble: called regularly; returns why no further rank will connect, None while some may.
            timeout: seconds for everything, None for no limit.
            most: of a job that is over when `trouble` says so, how many processes it may have in all; 0 if it is over
                when all ranks have reported, or some seconds after one has failed.
            recovers: as for `collect`.

        Raises:
            LaunchError: `trouble` said so before all ranks had connected.
            TimeoutExceeded: the time has passed.
        """
        self._ranks, self._most, self._call = ranks, most or ranks, packed
        self._acceptor.limit = self._most + _OTHER_CONNECTIONS
        for connection in self._connections.values():
            connection.frames.send(packed)
        is_over = (lambda: self._has_ended(trouble)) if most else None
        with ProgressLine() as line:
            return collect(ranks, lambda seconds: self._poll(seconds, trouble, line), timeout, is_over, recovers)

    def _has_ended(self, trouble: Callable[[], str | None]) -> bool:
        """Whether the job is over, and nothing is on its way from its ranks any more.

        The connection of a host that was lost may never end.
        """
        now = time.monotonic()
        if self._ended is None and trouble() is not None:
            self._ended = now
        if self._ended is None:
            return False
        is_heard = not self._missing and all(rank.has_reported for rank in self._connections.values())
        return is_heard or now - self._ended > _LAST_SECONDS

    @property
    def _missing(self) -> int:
        """How many of the first ranks have not connected."""
        return sum(rank not in self._connections for rank in range(self._ranks))

    def _poll(self, seconds: float, trouble: Callable[[], str | None], line: ProgressLine) -> list[Outcome]:
        why = trouble()  # before ranks that connected in time are accepted
        for new in self._acceptor.poll():
            self._join(new)
        missing = self._missing
        if missing:
            came = {rank: connection.host for rank, connection in self._connections.items()}
            line.show(lambda: arrivals(came, self._ranks, " to be started"))
        else:
            line.remove()
        if why is not None and missing and not any(rank.has_reported for rank in self._connections.values()):
            raise LaunchError(f"{missing} of {self._ranks} ranks were never started: {why}")
        found = []
        for key, events in self._selector.select(seconds):
            connection = key.data
            if connection is None:
                continue
            if self._ended is not None:
                self._ended = time.monotonic()  # something still comes
            if (outcome := connection.move(events, self._ranks)) is not None:
                found.append(outcome)
            self._watch_again(connection)
        return found

    def _expects(self, claim: Claim) -> bool:
        """Reject a second process of the same rank, such as a task that the cluster has restarted."""
        return 0 <= claim.rank < self._most and claim.rank not in self._connections

    def _join(self, new: Authenticated) -> None:
        if not self._expects(new.claim):  # a rank that connected twice at once
            new.socket.close()
            return
        connection = _RankConnection(new.claim.rank, new.socket, new.address)
        connection.frames.send(self._call)
        self._watch(connection)

    def _watch(self, connection: _RankConnection) -> None:
        self._connections[connection.rank] = connection
        self._selector.register(connection.frames, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _watch_again(self, connection: _RankConnection) -> None:
        if connection.has_reported:
            self._selector.unregister(connection.frames)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.frames.unsent else 0)
        self._selector.modify(connection.frames, wanted, connection)


class _RankConnection:
    """The driver's connection to one rank.

    Args:
        rank: by which it has introduced itself: its own, or a higher number if it may take the place of a lost one.
        connected: this end of the connection.
        host: its name, an address until the rank has said it.
        why_it_ended: of a process of this host, waits for its end; None for ranks that have connected.

    Attributes:
        has_reported: whether its outcome is known.
    """

    def __init__(
        self, rank: int, connected: socket.socket, host: str, why_it_ended: Callable[[], Failure] | None = None
    ) -> None:
        self.rank, self.host, self.frames = rank, host, FrameSocket(connected, Purpose.LAUNCHER)
        self.has_reported = False
        self._why_it_ended, self._has_introduced_itself = why_it_ended, why_it_ended is not None

    def move(self, events: int, ranks: int) -> Outcome | None:
        """Send and receive without waiting; returns the outcome once it is known.

        Args:
            events: that the selector has seen.
            ranks: number of ranks of the job.
        """
        try:
            if events & selectors.EVENT_WRITE:
                self.frames.write()
        except Disconnected:
            events |= selectors.EVENT_READ  # what the rank said before it ended can still be read
        try:
            while events & selectors.EVENT_READ and (message := self.frames.receive(0)) is not None:
                if not self._has_introduced_itself:
                    self.host, self._has_introduced_itself = quoted(message.decode(errors="replace"), 64), True
                    continue
                self.has_reported = True
                return self._outcome(message, ranks)
        except Disconnected:
            self.has_reported = True
            if self._why_it_ended is not None:
                return Outcome(self.rank, failure=self._why_it_ended())
            return self._failure("its process or the task around it was ended", is_loss=True)
        return None

    def _outcome(self, message: bytes, ranks: int) -> Outcome:
        try:
            outcome = pickle.loads(message)
            is_new = self.rank >= ranks
            if isinstance(outcome, Outcome) and (outcome.rank < ranks if is_new else outcome.rank == self.rank):
                return outcome
            why: object = f"it is a {type(outcome).__name__}"
        except Exception as error:  # an object's own hooks may raise anything
            why = error
        return self._failure(f"its outcome cannot be read ({why}); is the same ring_plugins installed there?")

    def _failure(self, summary: str, is_loss: bool = False) -> Outcome:
        return Outcome(self.rank, failure=Failure(self.host, summary, is_loss=is_loss))


class DriverConnection:
    """A rank's end.

    Args:
        rank: of this process.
        connected: this end of the connection.
    """

    def __init__(self, rank: int, connected: socket.socket) -> None:
        self._rank, self._frames = rank, FrameSocket(connected, Purpose.LAUNCHER)

    def fileno(self) -> int:
        """The open file."""
        return self._frames.fileno()

    def receive_call(self) -> bytes:
        """Wait for the call that the driver sends.

        Raises:
            LaunchError: the driver is gone.
        """
        try:
            while (packed := self._frames.receive(3600.0)) is None:
                pass
        except Disconnected as error:
            raise LaunchError(
                f"{_here(self._rank)} lost the driver before it received a function to call ({error})."
            ) from error
        return packed

    def report(self, outcome: Outcome) -> None:
        """Send the driver this rank's outcome; it reads the first only."""
        with contextlib.suppress(Disconnected):  # nobody waits for it any more
            self._frames.send(pickle.dumps(outcome))
            self._frames.flush()

    def wait_for_end(self, seconds: float | None = None) -> bool:
        """Wait until the driver closes the connection, for `seconds` at most; returns whether it has."""
        poll = select.poll()
        poll.register(self._frames, select.POLLRDHUP)
        return bool(poll.poll(None if seconds is None else seconds * 1000))

    def close(self) -> None:
        """Close the connection."""
        self._frames.close()


def connect_to_driver(address: str, port: int, key: bytes, rank: int) -> DriverConnection:
    """Connect a rank on any host to its driver.

    Args:
        address, port, key: of the driver.
        rank: of this process.

    Raises:
        LaunchError: the driver cannot be reached, or does not expect this rank.
    """
    end = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            return _connect(address, port, key, rank, end)
        except Rejected as error:
            raise LaunchError(
                f"{_here(rank)} was rejected by the driver at {address}:{port} ({error}): the cluster has started "
                "this rank twice, or another run's driver listens there."
            ) from error
        except (OSError, Disconnected) as error:
            # A driver with too many unauthenticated connections drops the oldest.
            if isinstance(error, Disconnected) and time.monotonic() < end:
                time.sleep(0.05)
                continue
            raise LaunchError(
                f"{_here(rank)} cannot reach the driver at {address}:{port} ({error}): it has ended, or a "
                "firewall is between them."
            ) from error


def _here(rank: int) -> str:
    return f"rank {rank} on {socket.gethostname()}"


def _connect(address: str, port: int, key: bytes, rank: int, end: float) -> DriverConnection:
    connected = socket.create_connection((address, port), max(end - time.monotonic(), 1.0))
    try:
        handshake = ClientHandshake(key, Purpose.LAUNCHER, Claim(rank))
        authenticate(connected, handshake, max(end - time.monotonic(), 1.0))
        frames = FrameSocket(connected, Purpose.LAUNCHER)
        frames.send(socket.gethostname().encode())
        frames.flush(max(end - time.monotonic(), 1.0))
        return DriverConnection(rank, connected)
    except BaseException:
        connected.close()
        raise
