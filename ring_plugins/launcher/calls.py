"""Connections between a driver and its ranks, and processes that are ranks: the driver sends a call, and gathers
the outcomes.

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
import itertools
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ring_plugins.core.base.errors import LaunchError, quoted
from ring_plugins.core.base.install import own_python
from ring_plugins.core.base.progress_line import ProgressLine, arrivals
from ring_plugins.core.linux.process import ending
from ring_plugins.core.net.acceptor import Acceptor, Authenticated
from ring_plugins.core.net.auth import Claim, Disconnected, Purpose, Rejected
from ring_plugins.core.net.frames import FrameSocket, Unreached, reach
from ring_plugins.core.net.peers import Event, Peers
from ring_plugins.launcher.outcomes import Failure, Outcome, collect

#: Connections that the driver keeps in addition to those of its ranks, and those that wait in the kernel.
_OTHER_CONNECTIONS, _BACKLOG = 64, 1024
#: Seconds for which the driver still waits for outcomes of ranks that have ended, as long as nothing arrives.
_LAST_SECONDS = 2.0
#: Seconds in which a rank must reach the driver.
_CONNECT_SECONDS = 60.0
_HERE = "from ring_plugins.launcher.function import run_rank_here as run; run({fd}, {parent}, {rank}, {by!r}, {path})"


class RankProcess:
    """One rank: a fresh process of this Python, which ends with the thread that started it.

    Args:
        rank: its number.
        environment: all of its variables.
        fd: of its connection to the driver.
        pass_fds: further file descriptors that it inherits.
        stdout, stderr: as for Popen.
        by: what starts it, for messages.
        path: where it searches for modules first.
    """

    def __init__(
        self,
        rank: int,
        environment: Mapping[str, str],
        fd: int,
        pass_fds: Sequence[int] = (),
        stdout: int | None = None,
        stderr: int | None = None,
        by: str = "ring_plugins.run",
        path: Sequence[str] = (),
    ) -> None:
        self._process = subprocess.Popen(
            own_python(_HERE.format(fd=fd, parent=os.getpid(), rank=rank, by=by, path=list(path))),
            env=dict(environment),
            pass_fds=[*pass_fds, fd],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            # Ctrl-C reaches the process that called `run`, which ends the ranks. In its session each of them would
            # print its own KeyboardInterrupt.
            start_new_session=True,
        )

    def failure(self) -> Failure:
        """Wait for the end of the process, which has reported no outcome."""
        code = self._process.wait()
        return Failure(socket.gethostname(), f"its process ended with {ending(code)}", is_loss=code < 0)

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process and whatever it started in its session."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


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
        self._connections: dict[int, _Connection] = {}
        self._acceptor = Acceptor(self.key, Purpose.LAUNCHER, self._expects)
        if listens:
            listener = socket.create_server(("0.0.0.0", 0), backlog=_BACKLOG)
            self.port = listener.getsockname()[1]
            self._acceptor.add(listener)
        self._peers = Peers(self._acceptor)

    def __enter__(self) -> Driver:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._peers.close()

    def add(self, rank: int, connected: socket.socket, process: RankProcess) -> None:
        """Add the connection of a process of this host, which is a rank.

        Args:
            rank: of the process.
            connected: this end of the connection.
            process: that.
        """
        self._connections[rank] = _Connection(socket.gethostname(), process)
        self._peers.add(rank, FrameSocket(connected, Purpose.LAUNCHER))

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
            most: if not 0, the job is over when `trouble` says so, and may have this many processes in all. Otherwise
                it is over when all ranks have reported, or some seconds after one has failed.
            recovers: as for `collect`.

        Raises:
            LaunchError: `trouble` said so before all ranks had connected.
            TimeoutExceeded: the time has passed.
        """
        self._ranks, self._most, self._call = ranks, most or ranks, packed
        self._acceptor.limit = self._most + _OTHER_CONNECTIONS
        for rank in self._peers:
            self._peers.send(rank, packed)
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
        for new in self._peers.accepted():
            self._join(new)
        missing = self._missing
        if missing:
            came = {rank: connection.host for rank, connection in self._connections.items()}
            line.show(lambda: arrivals(came, self._ranks, " to be started"))
        else:
            line.remove()
        if why is not None and missing and not any(rank.has_reported for rank in self._connections.values()):
            raise LaunchError(f"{missing} of {self._ranks} ranks were never started: {why}")
        # All that these have said has arrived; what they have started may keep their connections open.
        ended = [rank for rank, one in self._connections.items() if one.process is not None and one.process.has_ended()]
        ready = self._peers.wait(seconds)
        if ready and self._ended is not None:
            self._ended = time.monotonic()  # something still comes
        ends = ((rank, Disconnected("its process has ended")) for rank in ended)
        events = itertools.chain(self._peers.events(ready), ends)
        found = (self._take(rank, self._connections[rank], event) for rank, event in events)
        return [outcome for outcome in found if outcome is not None]

    def _take(self, rank: int, connection: _Connection, event: Event) -> Outcome | None:
        """The outcome of a rank, from its message, or from the end of its connection."""
        if connection.has_reported:
            return None
        if isinstance(event, bytes) and connection.process is None and not connection.has_introduced_itself:
            connection.host, connection.has_introduced_itself = quoted(event.decode(errors="replace"), 64), True
            return None
        connection.has_reported = True
        if not isinstance(event, bytes):
            ended = Failure(connection.host, "its process or the task around it was ended", is_loss=True)
            return Outcome(rank, failure=ended if connection.process is None else connection.process.failure())
        try:
            outcome = pickle.loads(event)
            is_new = rank >= self._ranks
            if isinstance(outcome, Outcome) and (outcome.rank < self._ranks if is_new else outcome.rank == rank):
                return outcome
            why: object = f"it is a {type(outcome).__name__}"
        except Exception as error:  # an object's own hooks may raise anything
            why = error
        text = f"its outcome cannot be read ({why}); is the same ring_plugins installed there?"
        return Outcome(rank, failure=Failure(connection.host, text))

    def _expects(self, claim: Claim) -> bool:
        """Reject a second process of the same rank, such as a task that the cluster has restarted."""
        return 0 <= claim.rank < self._most and claim.rank not in self._connections

    def _join(self, new: Authenticated) -> None:
        if not self._expects(new.claim):  # a rank that connected twice at once
            new.socket.close()
            return
        rank = new.claim.rank
        self._connections[rank] = _Connection(new.address)
        self._peers.add(rank, FrameSocket(new.socket, Purpose.LAUNCHER))
        self._peers.send(rank, self._call)


@dataclass
class _Connection:
    """What the driver knows of a connection to a rank.

    Connected ranks are known by their own number, or a higher one if they may take the place of a lost one.

    Attributes:
        host: name of its host, an address until the rank has said it.
        process: of this host; None for ranks that have connected.
        has_introduced_itself: whether it has said its host.
        has_reported: whether its outcome is known.
    """

    host: str
    process: RankProcess | None = None
    has_introduced_itself: bool = False
    has_reported: bool = False


class DriverConnection:
    """A rank's end.

    Args:
        rank: of this process.
        frames: this end of the connection.
    """

    def __init__(self, rank: int, frames: FrameSocket) -> None:
        self._rank, self._frames = rank, frames

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
            self._frames.say(pickle.dumps(outcome))

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
    try:
        frames = reach(lambda: [(address, port)], key, Purpose.LAUNCHER, Claim(rank), _CONNECT_SECONDS)
        frames.say(socket.gethostname().encode(), _CONNECT_SECONDS)
    except (OSError, Disconnected) as error:
        if isinstance(error, Unreached) and isinstance(error.error, Rejected):
            raise LaunchError(
                f"{_here(rank)} was rejected by the driver at {error}: the cluster has started this rank twice, or "
                "another run's driver listens there."
            ) from error
        where = error if isinstance(error, Unreached) else f"{address}:{port}: {error}"
        raise LaunchError(
            f"{_here(rank)} cannot reach the driver at {where}: it has ended, or a firewall is between them."
        ) from error
    return DriverConnection(rank, frames)


def _here(rank: int) -> str:
    return f"rank {rank} on {socket.gethostname()}"
