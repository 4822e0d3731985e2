"""Connections between a driver and its ranks on other hosts: the driver sends a call and gathers the outcomes.

Each rank connects to the driver, and the end of a connection shows that the other side is gone. The key travels with
the ranks, in the environment or through the cluster's own channels. A call and its outcome are pickles, which can
run any code: nothing is unpickled before both sides have proved that they know the key (core/net/auth.py).

    rank -> driver   its host's name
    driver -> rank   the call, as `outcomes.pack_call` made it
    rank -> driver   the outcome
"""

from __future__ import annotations

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

    Attributes:
        port: where it listens, at all addresses of this host.
        key: that ranks must know.
    """

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)
        listener = socket.create_server(("0.0.0.0", 0), backlog=_BACKLOG)
        self.port: int = listener.getsockname()[1]
        self._ranks = self._most = 0
        self._call = b""
        self._ended: float | None = None
        self._connections: dict[int, _RankConnection] = {}
        self._acceptor = Acceptor(self.key, Purpose.LAUNCHER, self._expects)
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

    def outcomes(
        self,
        packed: bytes,
        ranks: int,
        trouble: Callable[[], str | None],
        timeout: float | None,
        most: int = 0,
        recovers: bool = False,
    ) -> list[Outcome]:
        """Send the call to every rank that connects, and gather the outcomes in the order of their arrival.

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
            if (outcome := connection.move(events)) is not None:
                found.append(outcome)
            self._watch(connection)
        return found

    def _expects(self, claim: Claim) -> bool:
        """Reject a second process of the same rank, such as a task that the cluster has restarted."""
        return 0 <= claim.rank < self._most and claim.rank not in self._connections

    def _join(self, new: Authenticated) -> None:
        if not self._expects(new.claim):  # a rank that connected twice at once
            new.socket.close()
            return
        frames = FrameSocket(new.socket, Purpose.LAUNCHER)
        connection = _RankConnection(new.claim.rank, new.address, frames, self._ranks)
        connection.frames.send(self._call)
        self._connections[connection.rank] = connection
        self._selector.register(connection.frames, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _watch(self, connection: _RankConnection) -> None:
        if connection.has_reported:
            self._selector.unregister(connection.frames)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.frames.unsent else 0)
        self._selector.modify(connection.frames, wanted, connection)


class _RankConnection:
    """The driver's connection to one rank.

    Args:
        rank: by which it has introduced itself: its own, or a higher number if it may take the place of a lost one.
        host: its name, an address until the rank has said it.
        frames: the connection.
        ranks: number of ranks of the job.

    Attributes:
        has_reported: whether its outcome is known.
    """

    def __init__(self, rank: int, host: str, frames: FrameSocket, ranks: int) -> None:
        self.rank, self.frames, self._ranks = rank, frames, ranks
        self.has_reported = False
        self.host, self._has_introduced_itself = host, False

    def move(self, events: int) -> Outcome | None:
        """Send and receive without waiting; returns the outcome once it is known."""
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
                return self._outcome(message)
        except Disconnected:
            return self._failure("its process or the task around it was ended", is_loss=True)
        return None

    def _outcome(self, message: bytes) -> Outcome:
        try:
            outcome = pickle.loads(message)
            is_new = self.rank >= self._ranks
            if isinstance(outcome, Outcome) and (outcome.rank < self._ranks if is_new else outcome.rank == self.rank):
                return outcome
            why: object = f"it is a {type(outcome).__name__}"
        except Exception as error:  # an object's own hooks may raise anything
            why = error
        return self._failure(f"its outcome cannot be read ({why}); is the same ring_plugins installed there?")

    def _failure(self, summary: str, is_loss: bool = False) -> Outcome:
        self.has_reported = True
        return Outcome(self.rank, failure=Failure(self.host, summary, is_loss=is_loss))


class DriverConnection:
    """A rank's end.

    Args:
        address, port, key: of the driver.
        rank: of this process.

    Raises:
        LaunchError: the driver cannot be reached, or does not expect this rank.
    """

    def __init__(self, address: str, port: int, key: bytes, rank: int) -> None:
        self._where = f"rank {rank} on {socket.gethostname()}"
        end = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                self._frames = _connect(address, port, key, rank, end)
                return
            except Rejected as error:
                raise LaunchError(
                    f"{self._where} was rejected by the driver at {address}:{port} ({error}): the cluster has started "
                    "this rank twice, or another run's driver listens there."
                ) from error
            except (OSError, Disconnected) as error:
                # A driver with too many unauthenticated connections drops the oldest.
                if isinstance(error, Disconnected) and time.monotonic() < end:
                    time.sleep(0.05)
                    continue
                raise LaunchError(
                    f"{self._where} cannot reach the driver at {address}:{port} ({error}): it has ended, or a "
                    "firewall is between them."
                ) from error

    def fileno(self) -> int:
        """The open file, which becomes readable when the driver is gone."""
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
                f"{self._where} lost the driver before it received a function to call ({error})."
            ) from error
        return packed

    def report(self, outcome: Outcome) -> None:
        """Send the driver this rank's outcome."""
        try:
            self._frames.send(pickle.dumps(outcome))
            self._frames.flush()
        except Disconnected:
            pass  # nobody waits for it any more

    def wait_for_end(self) -> None:
        """Wait until the driver closes the connection; it sends nothing after the call."""
        poll = select.poll()
        poll.register(self._frames, select.POLLIN)
        poll.poll()

    def close(self) -> None:
        """Close the connection."""
        self._frames.close()


def _connect(address: str, port: int, key: bytes, rank: int, end: float) -> FrameSocket:
    connected = socket.create_connection((address, port), max(end - time.monotonic(), 1.0))
    try:
        handshake = ClientHandshake(key, Purpose.LAUNCHER, Claim(rank))
        authenticate(connected, handshake, max(end - time.monotonic(), 1.0))
        frames = FrameSocket(connected, Purpose.LAUNCHER)
        frames.send(socket.gethostname().encode())
        frames.flush(max(end - time.monotonic(), 1.0))
        return frames
    except BaseException:
        connected.close()
        raise
