"""What the supervisor of a host is told when it starts, and its connection to the coordinator of the job.

**When the connection ends**, the kernel says how, and that tells whether the coordinator is gone:

- Its host has acknowledged nothing for RING_NETWORK_TIMEOUT: the host is down, or the network is cut. The ranks agree
  among themselves who goes on, and the supervisor lets them.
- The connection was closed or reset: the supervisor connects once more. If that is refused, or answered by something
  that does not know the job's key, the coordinator has ended or was killed, and the supervisor ends its ranks
  (`Link.is_orphaned`). Otherwise the coordinator lives, and the ranks go on. So they do if the connection is accepted
  and nothing answers, since the coordinator may be busy with a host that is silent.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.net.auth import Claim, Disconnected, Purpose, WrongSecret
from ring_plugins.core.net.frames import Unreached, from_json, reach, to_json
from ring_plugins.core.net.sockets import end_when_silent

#: Seconds to connect to the coordinator, at each of its addresses if it may not be there yet, and to find out whether
#: it is gone.
_CONNECT, _TRY, _ASK = 30.0, 3.0, 2.0
#: How a connection ends that its other end, rather than the network, has closed; 0 stands for no error.
_CLOSED = (0, errno.ECONNRESET, errno.EPIPE)


@dataclass(frozen=True)
class HostJob:
    """All that a host's supervisor has to know of the job.

    Attributes:
        addresses: at which it may reach the coordinator, the likeliest first.
        port, key: where that listens, and a secret.
        index, hosts: number of this host, and how many there are.
        ranks: of this host.
        size: of the job.
        command: of every rank.
        environment: variables of every rank, in addition to those of this process.
        tag_output, output_directory: as in `JobSpec`.
        patience: seconds for which the coordinator may not be there yet.
        recovers: whether the job goes on when ranks are lost.
        replaces: whether other processes take the places of ranks that are lost.
        standbys: how many processes wait to do so.
        most: up to how many ranks the job may grow; 0 for no more than `size`.
        is_added: whether the job has begun without this host, whose ranks join it.
        question: for `probe.report`, of a host that is to be compared with the coordinator's.
    """

    addresses: Sequence[str]
    port: int
    key: str
    index: int
    hosts: int
    ranks: Sequence[int]
    size: int
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    tag_output: bool = False
    output_directory: str | None = None
    patience: float = 0.0
    recovers: bool = True
    replaces: bool = False
    standbys: int = 0
    most: int = 0
    is_added: bool = False
    question: dict[str, Any] | None = None

    def pack(self) -> bytes:
        """As `unpack` takes it."""
        return to_json(asdict(self))

    @classmethod
    def unpack(cls, data: bytes) -> HostJob:
        """The job that bytes of `pack` describe."""
        return cls(**from_json(data))


def read_message(data: bytes) -> tuple[str, Any]:
    """The kind and the body of a message between a supervisor and the coordinator.

    Raises:
        Disconnected: it is none.
    """
    message = from_json(data)
    if not isinstance(message, list) or len(message) != 2 or not isinstance(message[0], str):
        raise Disconnected("it sent an invalid message", is_invalid=True)
    return message[0], message[1]


class Link:
    """The connection to the coordinator.

    Args:
        job: says where it is.
        is_over: whether to wait for it no longer.

    Attributes:
        is_lost: whether the connection has ended.
        is_orphaned: whether the coordinator has ended, too.

    Raises:
        LaunchError: it cannot be reached.
    """

    def __init__(self, job: HostJob, is_over: Callable[[], bool] = lambda: True) -> None:
        self.is_lost = self.is_orphaned = False
        self._key, self._claim = job.key.encode(), Claim(job.index)
        places, end = [(address, job.port) for address in job.addresses], time.monotonic() + job.patience
        try:
            self._frames = reach(
                lambda: places, self._key, Purpose.LAUNCHER, self._claim, _TRY if job.patience else _CONNECT,
                lambda why: time.monotonic() > end or is_over(), 0.1,
            )  # fmt: skip
        except Unreached as why:
            raise LaunchError(
                f"{socket.gethostname()} cannot reach the process that started this job ({why}): it has ended, or a "
                "firewall is between the hosts."
            ) from why
        end_when_silent(self._frames.socket)
        self._place = self._frames.socket.getpeername()[:2]

    def send(self, kind: str, body: Any) -> None:
        """Send a message, unless the connection is lost."""
        with contextlib.suppress(Disconnected, TimeoutError):
            if not self.is_lost:
                self._frames.say(to_json([kind, body]), config.NETWORK_TIMEOUT.get())

    def read(self) -> list[tuple[str, Any]]:
        """The messages that have arrived."""
        if self.is_lost:
            return []
        try:
            return [read_message(data) for data in self._frames.read()]
        except Disconnected as error:
            self.is_lost = True
            self._frames.close()
            # No error, or a reset: the coordinator, or something on the way, has closed the connection.
            self.is_orphaned = error.code in _CLOSED and not self._answers()
            return []

    def _answers(self) -> bool:
        """Whether the coordinator may live, as it answers or nothing says that it does not."""
        try:
            reach(lambda: [self._place], self._key, Purpose.LAUNCHER, self._claim, _ASK).close()
        except Unreached as why:
            # Whoever rejects it, but not its key, has this host already. What drops it is something else.
            return type(why.error) not in (ConnectionRefusedError, WrongSecret, Disconnected)
        return True

    def close(self) -> None:
        """Close the connection."""
        self._frames.close()
