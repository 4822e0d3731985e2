"""Messages on a socket that never blocks: a length and JSON, which unlike pickle can do no harm."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
#: Longest message, and longest before the other side has proved that it belongs to this job.
_LONGEST, _LONGEST_FROM_STRANGERS = 1 << 24, 1 << 10
#: What may wait to be sent; beyond it messages that nobody must have are dropped.
ENOUGH = 1 << 22


class Disconnected(Exception):
    """The other side is gone; the text says how that was noticed."""


class FrameSocket:
    """One connection.

    Attributes:
        trusted: whether the other side has proved that it knows the job's secret.
        dropped: messages that were not sent because too many waited.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.trusted = False
        self.dropped = 0
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._outgoing)

    def send(self, message: Any, droppable: bool = False) -> None:
        """Take a message; `write` sends it."""
        if droppable and len(self._outgoing) > ENOUGH:
            self.dropped += 1
            return
        data = json.dumps(message, separators=(",", ":")).encode()
        self._outgoing += _LENGTH.pack(len(data)) + data

    def write(self) -> None:
        """Send what the network takes now.

        Raises:
            Disconnected: the connection is lost.
        """
        while self._outgoing:
            try:
                sent = self.socket.send(memoryview(self._outgoing)[: 1 << 18].tobytes())
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise Disconnected(str(error)) from error
            del self._outgoing[:sent]

    def read(self) -> list[Any]:
        """All messages that have arrived whole.

        Raises:
            Disconnected: the other side closed, or sent what is no message.
        """
        end = ""
        try:
            while data := self.socket.recv(1 << 18):
                self._incoming += data
            end = "it closed the connection"
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            end = error.strerror or str(error)
        messages = list(self._whole_messages())
        if end and not messages:
            raise Disconnected(end)
        return messages  # the end is met again by the next call

    def _whole_messages(self) -> list[Any]:
        messages = []
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > (_LONGEST if self.trusted else _LONGEST_FROM_STRANGERS):
                raise Disconnected(f"a message of {length} bytes is none of this job's")
            end = _LENGTH.size + length
            if len(self._incoming) < end:
                break
            try:
                messages.append(json.loads(bytes(self._incoming[_LENGTH.size : end])))
            except ValueError as error:
                raise Disconnected("it sent what is no message of this job's") from error
            del self._incoming[:end]
        return messages

    def close(self) -> None:
        self.socket.close()


def nonce() -> str:
    """Sixteen random bytes that the other side must sign."""
    return secrets.token_hex(16)


def proof(secret: str, *said: object) -> str:
    """What only someone who knows the job's secret can say about `said`."""
    text = "\n".join(map(str, said))
    return hmac.new(bytes.fromhex(secret), text.encode(), hashlib.sha256).hexdigest()


def is_proof(claimed: object, secret: str, *said: object) -> bool:
    """Whether `claimed` is that."""
    return isinstance(claimed, str) and hmac.compare_digest(claimed, proof(secret, *said))
