"""Whether a process still listens on its port. When a connection has ended, a second one shows that.

- **Refused**: nobody listens there. The process is dead.
- **Answered**: it lives, but has given up on this rank. Both sides take that for silence.
- **Nothing**: silence. Its host is down, or the network is cut.

A stopped process keeps its connections, so nobody asks. Whoever sends resets and refusals in the name of another host,
as a firewall may, is believed; docs/fault_tolerance.md says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time

from ring_plugins.core.base.log import logger

#: Errors by which the kernel says that another host does not react, rather than that a process has closed its end.
NETWORK_LOST = frozenset(
    (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ENONET)
)


class ListenProbe:
    """Finds out whether a process still listens, by connecting to it without waiting.

    Args:
        address, port: where it listened.
        patience: seconds after which it counts as silent.
    """

    def __init__(self, address: str, port: int, patience: float) -> None:
        self._where, self._end = (address, port), time.monotonic() + patience
        self._socket: socket.socket | None = None

    def advance(self) -> str:
        """ "dead", "silent", or "" while that is not known."""
        try:
            if self._socket is None:
                family = socket.AF_INET6 if ":" in self._where[0] else socket.AF_INET
                self._socket = socket.socket(family, socket.SOCK_STREAM)
                self._socket.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    self._socket.connect(self._where)
            elif self._socket.recv(1):  # the first byte of a handshake
                self.close()
                return "silent"
            else:
                self.close()  # it has taken the connection and ended, or is about to
        except BlockingIOError:
            pass
        except OSError as error:
            self.close()
            if error.errno == errno.ECONNREFUSED:
                return "dead"
            if error.errno in NETWORK_LOST:
                return "silent"
            if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                logger.debug(f"{self._where}: {os.strerror(error.errno or 0)}")
        if time.monotonic() > self._end:
            self.close()
            return "silent"
        return ""

    def close(self) -> None:
        """Stop asking."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
