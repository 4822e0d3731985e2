"""A connection on which a rank and rank 0 talk while the job starts, and why there is none.

Messages are JSON, which unlike pickle can do no harm, a length ahead of each.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import time
from typing import Any

_LONGEST = 1 << 24
#: Seconds that connecting, or sending or receiving a message, may take.
SECONDS = 5.0


class Guest:
    """A connection, seen from either end, that never blocks for longer than a message takes."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.rank = -1
        self.host = "?"
        self.nonce = secrets.token_hex(16)
        self._incoming = bytearray()

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        self.socket.sendall(struct.pack("!I", len(data)) + data)

    def receive(self) -> Any:
        """A message if one has arrived whole, else None.

        Raises:
            EOFError: the other side closed, OSError, ValueError: it does not speak our language.
        """
        while True:
            if len(self._incoming) >= 4:
                (length,) = struct.unpack_from("!I", self._incoming)
                if length > _LONGEST:
                    raise ValueError("it does not speak ring_plugins")
                if len(self._incoming) >= 4 + length:
                    message = json.loads(bytes(self._incoming[4 : 4 + length]))
                    del self._incoming[: 4 + length]
                    return message
            self.socket.setblocking(False)
            try:
                data = self.socket.recv(1 << 18)
            except BlockingIOError:
                return None
            finally:
                self.socket.settimeout(SECONDS)
            if not data:
                raise EOFError("it closed the connection")
            self._incoming += data


def next_message(guest: Guest, end: float) -> Any:
    """The next message; TimeoutError at `end` of `time.monotonic`."""
    while (message := guest.receive()) is None:
        if time.monotonic() > end:
            raise TimeoutError("no answer")
        time.sleep(0.0005)
    return message


def unreachable(address: str, port: int, error: Exception) -> str:
    """Why an address cannot be reached, and what to do about it."""
    at = f"{address}:{port}"
    if isinstance(error, socket.gaierror):
        return (
            f"the name {address} does not resolve here ({error.strerror}); add it to /etc/hosts or DNS, or let "
            "MASTER_ADDR be an address"
        )
    numeric = ""
    with contextlib.suppress(OSError):
        numeric = str(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0])
    if numeric.startswith("127.") and not address.startswith("127."):
        return (
            f"{address} resolves to {numeric} here, which is this host itself, and nobody listens there. If rank "
            "0 runs "
            f"on another host, correct the line of /etc/hosts on {socket.gethostname()}, or let MASTER_ADDR be "
            "an address"
        )
    if isinstance(error, TimeoutError):
        return f"no answer from {at}: the host is down, or a firewall drops what is sent to that port"
    if isinstance(error, ConnectionRefusedError):
        return f"{at} refuses connections: rank 0 has not come that far, has ended, or listens elsewhere"
    if isinstance(error, (EOFError, ValueError)):
        return f"who listens at {at} is not rank 0 of a ring_plugins job ({error})"
    return f"{at} cannot be reached ({getattr(error, 'strerror', None) or error})"
