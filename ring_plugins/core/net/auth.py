"""The handshake by which processes of a job authenticate each other on a new connection.

The problem. A job listens in several places: every rank for data, rank 0 for the control channel and, while the ranks
meet, for the bootstrap and to measure networks, and a launcher for the ranks that it started. Everyone who can reach
the host can connect to these ports, and every local user can connect to an abstract unix socket. docs/security.md lists
them.

Threat model. A process that can connect but does not know the job's secret (another user, a port scanner, a health
check, a rank of another job) must not take part in the job, run code in it, read from it, end it, delay it, or use up
its files, threads or memory. Outside the model are root and processes of the same user, who can read the secret in
memory, and everyone who can change packets under way: the handshake is authenticated, the data after it is neither
signed nor encrypted. A network on which that matters needs WireGuard or IPsec below it.

The handshake. Three messages of fixed size, 1.5 round trips:

    client                                                                server
           <- CHALLENGE  header | server's nonce
              RESPONSE   header | rank, target, tag | client's nonce | proof ->
           <- RESULT     header | status | proof

    header  magic, version, purpose (data, control, bootstrap, launcher, probe), kind of message
    proof   HMAC-SHA256(secret, role | all bytes of the handshake before the proof)

Both nonces, the role, the purpose and the claim (rank, target, tag) are covered by both proofs. So a proof cannot be
replayed or reflected to its author, and is invalid at a port of another purpose, for another rank or for another tag.
The client proves first: a process that merely connects receives nothing computed from the secret, so it cannot guess a
weak RING_SECRET offline. Before both proofs nothing is parsed but integers at fixed offsets. JSON comes after them, and
so do the launcher's pickles, which can run any code.

acceptor.py bounds the number of connections that have not authenticated themselves, and their time.

The handshake is a state machine without input and output, since two of its users block (launcher, bootstrap) and two
must not: the listener and the message loop (peers.py) serve all peers in one thread.

Considered and left. TLS: certificates would have to reach every rank, the ssl module knows pre-shared keys from Python
3.13 only, and encryption would slow down data that now moves at the speed of the network.
multiprocessing.connection: it accepts and authenticates in one blocking call, so one silent connection blocks all
others; its proofs bind neither purpose nor rank; and it unpickles. A password-authenticated key exchange such as SPAKE2
would protect weak secrets from an impostor server; instead, launchers make secrets random.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

MAGIC, VERSION = b"ringauth", 1
_HEADER = struct.Struct("!8sBBB")
_CLAIM = struct.Struct("!iiq")
_STATUS = struct.Struct("!B")
_NONCE, _PROOF = 16, hashlib.sha256().digest_size
_CHALLENGE_BYTES = _HEADER.size + _NONCE
_RESPONSE_BYTES = _HEADER.size + _CLAIM.size + _NONCE + _PROOF
_RESULT_BYTES = _HEADER.size + _STATUS.size + _PROOF

#: Seconds in which a connection has to authenticate itself: thousands of round trips, yet short enough that silent
#: connections do not pile up.
HANDSHAKE_SECONDS = 5.0


class Purpose(enum.IntEnum):
    """What a connection is for."""

    DATA = 1
    CONTROL = 2
    BOOTSTRAP = 3
    LAUNCHER = 4
    PROBE = 5


class Claim(NamedTuple):
    """What a client claims to be.

    Attributes:
        rank: of the client.
        target: rank that it wants to reach.
        tag: of the transfers on a data connection.
    """

    rank: int
    target: int = 0
    tag: int = 0


class Disconnected(Exception):
    """The connection has ended or carries another protocol; the text completes "rank 3: ...".

    Attributes:
        code: the kernel's error (errno), 0 if the other side closed the connection or sent something invalid.
        is_invalid: whether it sent something invalid.
    """

    def __init__(self, text: str, code: int = 0, is_invalid: bool = False) -> None:
        super().__init__(text)
        self.code, self.is_invalid = code, is_invalid

    @classmethod
    def by(cls, error: OSError) -> Disconnected:
        """The end that an error of the kernel stands for."""
        return cls(error.strerror or str(error), error.errno or 0)


class Rejected(Disconnected):
    """The other side rejected this one's proof or claim, or failed to prove that it belongs to the job."""


class WrongSecret(Rejected):
    """The two sides do not know the same secret."""


class _Kind(enum.IntEnum):
    CHALLENGE = 1
    RESPONSE = 2
    RESULT = 3


class _Status(enum.IntEnum):
    ACCEPTED = 0
    WRONG_SECRET = 1
    UNWANTED = 2


# The handshake ----------------------------------------------------------------------------------------


class Handshake:
    """One side of the handshake: takes received bytes, and gives bytes to send.

    Attributes:
        outgoing: to send now.
        missing: bytes still to be read, 0 once the handshake is over.
        rejection: why it failed, once `outgoing` is sent.
    """

    def __init__(self, secret: bytes, purpose: Purpose) -> None:
        self.outgoing = b""
        self.missing = 0
        self.rejection: Rejected | None = None
        self._secret, self._purpose = secret, purpose
        self._incoming = self._expected = self._transcript = b""

    def feed(self, data: bytes) -> None:
        """Take bytes from the other side, at most `missing` of them.

        Raises:
            Disconnected: they belong to another protocol.
        """
        self._incoming += data
        self.missing -= len(data)
        self._check_header()
        if not self.missing:
            message, self._incoming = self._incoming, b""
            self._receive(message)

    def _receive(self, message: bytes) -> None:
        raise NotImplementedError

    def _expect(self, kind: _Kind, nbytes: int) -> None:
        self._expected, self.missing = self._header(kind), nbytes

    def _header(self, kind: _Kind) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, self._purpose, kind)

    def _check_header(self) -> None:
        """Fail at the first wrong byte: a peer with another protocol may never send a whole message."""
        got = self._incoming[: len(self._expected)]
        if got == self._expected[: len(got)]:
            return
        if got[: len(MAGIC)] != MAGIC[: len(got)]:
            raise Disconnected("it does not speak ring_plugins")
        if got[len(MAGIC)] != VERSION:
            raise Disconnected(
                f"it speaks version {got[len(MAGIC)]} of the handshake and this process version {VERSION}: install the "
                "same release of ring_plugins on all hosts"
            )
        raise Disconnected("it belongs to another part of ring_plugins")

    def _prove(self, role: bytes, transcript: bytes) -> bytes:
        return hmac.new(self._secret, role + transcript, hashlib.sha256).digest()


class ClientHandshake(Handshake):
    """The connecting side.

    Args:
        secret: of the job.
        purpose: of the connection.
        claim: of this process.

    Attributes:
        has_proved: whether the response has been made.
    """

    def __init__(self, secret: bytes, purpose: Purpose, claim: Claim) -> None:
        super().__init__(secret, purpose)
        self._claim = claim
        self.has_proved = False
        self._expect(_Kind.CHALLENGE, _CHALLENGE_BYTES)

    def _receive(self, message: bytes) -> None:
        if self.has_proved:
            self._finish(message)
            return
        response = self._header(_Kind.RESPONSE) + _CLAIM.pack(*self._claim) + secrets.token_bytes(_NONCE)
        response += self._prove(b"client", message + response)
        self._transcript = message + response
        self.outgoing, self.has_proved = response, True
        self._expect(_Kind.RESULT, _RESULT_BYTES)

    def _finish(self, message: bytes) -> None:
        signed, proof = message[:-_PROOF], message[-_PROOF:]
        status = signed[-1]
        if status == _Status.WRONG_SECRET:  # which carries no proof
            self.rejection = WrongSecret("it rejected this rank's secret")
        elif not hmac.compare_digest(proof, self._prove(b"server", self._transcript + signed)):
            self.rejection = WrongSecret("it did not prove that it knows the job's secret")
        elif status != _Status.ACCEPTED:
            self.rejection = Rejected("it does not expect this rank, or not here")


class ServerHandshake(Handshake):
    """The accepting side.

    Args:
        secret, purpose: as for `ClientHandshake`.
        expects: returns whether to accept a proved claim.

    Attributes:
        claim: of the client; not to be believed before the handshake is over without a `rejection`.
    """

    def __init__(self, secret: bytes, purpose: Purpose, expects: Callable[[Claim], bool]) -> None:
        super().__init__(secret, purpose)
        self._expects = expects
        self.claim = Claim(-1)
        self.outgoing = self._transcript = self._header(_Kind.CHALLENGE) + secrets.token_bytes(_NONCE)
        self._expect(_Kind.RESPONSE, _RESPONSE_BYTES)

    def _receive(self, message: bytes) -> None:
        signed, proof = message[:-_PROOF], message[-_PROOF:]
        self.claim = Claim(*_CLAIM.unpack_from(message, _HEADER.size))
        result = self._header(_Kind.RESULT)
        if not hmac.compare_digest(proof, self._prove(b"client", self._transcript + signed)):
            self.rejection = WrongSecret("it does not know the secret of this job")
            self.outgoing = result + _STATUS.pack(_Status.WRONG_SECRET) + bytes(_PROOF)
            return
        if self._expects(self.claim):
            result += _STATUS.pack(_Status.ACCEPTED)
        else:
            self.rejection = Rejected("it is not expected")
            result += _STATUS.pack(_Status.UNWANTED)
        self.outgoing = result + self._prove(b"server", self._transcript + message + result)


def advance(connected: socket.socket, handshake: Handshake) -> bool:
    """Advance a handshake on a non-blocking socket; returns whether it is complete.

    Reads no byte beyond the handshake.

    Raises:
        Rejected: one side rejects the other.
        Disconnected: the connection has ended, or carries something else.
    """
    try:
        while True:
            if handshake.outgoing:
                _send_whole(connected, handshake)
            if handshake.rejection is not None:
                raise handshake.rejection
            if not handshake.missing:
                return True
            data = connected.recv(handshake.missing)
            if not data:
                raise Disconnected("it closed the connection")
            handshake.feed(data)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError as error:
        raise Disconnected.by(error) from error


def _send_whole(connected: socket.socket, handshake: Handshake) -> None:
    data, handshake.outgoing = handshake.outgoing, b""
    try:
        sent = connected.send(data)
    except BlockingIOError:
        sent = 0
    except (BrokenPipeError, ConnectionResetError):
        if handshake.missing or handshake.rejection is not None:
            raise
        return  # the client has left already, and may have said goodbye behind its proof
    if sent != len(data):  # a fresh connection has room for a hundred bytes
        raise Disconnected("it takes no bytes")


def authenticate(connected: socket.socket, handshake: Handshake, seconds: float = HANDSHAKE_SECONDS) -> None:
    """Complete a handshake, waiting for the other side. Leaves the socket non-blocking.

    Raises:
        TimeoutError: it took longer than `seconds`.
        Rejected, Disconnected: see `advance`.
    """
    connected.setblocking(False)
    end = time.monotonic() + seconds
    while not advance(connected, handshake):
        if not wait_for(connected, select.POLLIN, end - time.monotonic()):
            raise TimeoutError("no answer")


def wait_for(connected: socket.socket, events: int, seconds: float) -> bool:
    """Sleep until poll(2) reports one of `events`, for `seconds` at most; whether it did."""
    poll = select.poll()
    poll.register(connected, events)
    return bool(poll.poll(max(seconds, 0.0) * 1000)) if seconds > 0 else False
