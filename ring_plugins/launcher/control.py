"""A driver and the tasks of a cluster that it has ranks run in: a line to each, whose end says that the other is gone.

The line is authenticated with a key that travels with the tasks, through the cluster's own channels.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from ring_plugins.core.base.errors import LaunchError, TimeoutExceeded
from ring_plugins.launcher.outcomes import Failure, Outcome

#: Seconds in which the others may report once a rank has failed.
_GRACE = 7.0


class Driver:
    """The driver's end. Used as a context; when it ends, so does what runs at the other ends.

    Attributes:
        port: where tasks call, at any address of this host.
        key: that they must know.
    """

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)
        self._listener = Listener(("0.0.0.0", 0), backlog=1024, authkey=self.key)
        self.port: int = self._listener.address[1]
        self._calls: queue.SimpleQueue[Connection[Any, Any]] = queue.SimpleQueue()
        self._lines: dict[int, tuple[Connection[Any, Any], str]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="ring:driver", daemon=True)
        self._thread.start()

    def __enter__(self) -> Driver:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            pass  # wakes the thread
        self._thread.join(5.0)
        self._listener.close()
        for line, _host in self._lines.values():
            line.close()

    def _accept(self) -> None:
        while not self._closed:
            # Whoever does not know the key, or goes away at once, is none of ours.
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                self._calls.put(self._listener.accept())

    def outcomes(
        self, packed: bytes, ranks: int, look: Callable[[], str | None], timeout: float | None
    ) -> list[Outcome]:
        """Hand the work to every rank that calls, and gather how each ended, the first to end first.

        Args:
            packed: what `outcomes.pack` made of `(function, args, kwargs)`.
            ranks: how many will call.
            look: called regularly; a text says that nobody else will call, and why.
            timeout: seconds for everything, or None.

        Raises:
            LaunchError: `look` said so before all had called.
            TimeoutExceeded: the time has passed.
        """
        found: list[Outcome] = []
        end = time.monotonic() + timeout if timeout is not None else float("inf")
        give_up = float("inf")
        while len(found) < ranks and time.monotonic() < give_up:
            why = look()
            self._welcome(packed)
            reported = {outcome.rank for outcome in found}
            waiting = {id(line): rank for rank, (line, _) in self._lines.items() if rank not in reported}
            if why is not None and len(self._lines) < ranks and not found:
                raise LaunchError(f"{ranks - len(self._lines)} of {ranks} ranks were never started: {why}")
            if time.monotonic() > end:
                late = sorted(set(range(ranks)) - reported)
                raise TimeoutExceeded(f"timeout={timeout:g}: ranks {late} of {ranks} had not finished, and were ended.")
            for ready in wait([self._lines[rank][0] for rank in waiting.values()], 0.1):
                found.append(self._outcome(waiting[id(ready)]))
                if found[-1].failure is not None:
                    give_up = min(give_up, time.monotonic() + _GRACE)
            if not waiting:
                time.sleep(0.05)
        return found

    def _welcome(self, packed: bytes) -> None:
        while not self._calls.empty():
            line = self._calls.get()
            with contextlib.suppress(EOFError, OSError):
                rank, host = line.recv()
                if rank in self._lines:  # a task that the cluster has started again
                    line.close()
                    continue
                self._lines[rank] = (line, host)
                line.send_bytes(packed)

    def _outcome(self, rank: int) -> Outcome:
        line, host = self._lines[rank]
        try:
            outcome = line.recv()
            assert isinstance(outcome, Outcome)
            return outcome
        except (EOFError, OSError):
            return Outcome(rank, failure=Failure(host, "the task that it ran in was ended, with the process"))


class Line:
    """A task's end.

    Args:
        address, port, key: of the driver.
        rank: that this task will run.

    Raises:
        LaunchError: the driver cannot be reached from here.
    """

    def __init__(self, address: str, port: int, key: bytes, rank: int) -> None:
        try:
            self.connection: Connection[Any, Any] = Client((address, port), authkey=key)
            self.connection.send((rank, socket.gethostname()))
        except (OSError, EOFError, AuthenticationError) as error:
            raise LaunchError(
                f"rank {rank} on {socket.gethostname()} cannot reach the driver at {address}:{port} ({error}): it has "
                "ended, or a firewall is between them."
            ) from error

    def work(self) -> bytes:
        """What the driver wants done."""
        return self.connection.recv_bytes()

    def report(self, outcome: Outcome) -> None:
        """Tell the driver how it ended."""
        with contextlib.suppress(OSError):
            self.connection.send(outcome)
