"""How ranks on several hosts meet without MPI: all of them call rank 0, which knows who is still missing.

The first message of a rank says who it is and which versions it runs, so that it can be told why it does not fit.

A connection on which a rank and rank 0 talk while the job starts, and why there is none.

Messages are JSON, which unlike pickle can do no harm, a length ahead of each.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError, name_ranks
from ring_plugins.core.base.log import logger
from ring_plugins.core.rendezvous.record import differences, own_versions

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


_MAGIC = "ring_plugins roll call 1"
#: Seconds after which a rank that waits says for whom, and again after twice as long, and so on.
_PATIENCE = 10.0


class Bootstrap:
    """Everyone's line to rank 0, and rank 0's to everyone.

    Made by `host` and `attend`. `gather` is the only thing it does.
    """

    def __init__(self, rank: int, size: int, host: str, guests: Sequence[Guest], own: Guest | None) -> None:
        self.rank, self.size = rank, size
        self._host = host
        self._guests = {guest.rank: guest for guest in guests}
        self._own = own

    def gather(self, payload: Any) -> list[Any]:
        """Everyone's payload (what JSON can hold) in rank order.

        Raises:
            LaunchError: a rank ended, or did not come within RING_START_TIMEOUT seconds.
        """
        if self._own is not None:
            try:
                self._own.send(["item", payload])
                return _answer(self._own, "rank 0")
            except (OSError, EOFError) as error:
                raise LaunchError(
                    f"rank {self.rank} on {socket.gethostname()} lost rank 0 on {self._host} while starting up "
                    f"({error}); look for the error that rank 0 printed."
                ) from error
        items: dict[int, Any] = {0: payload}
        waiting = _Patience(f"rank 0 on {socket.gethostname()}")
        while missing := [guest for rank, guest in self._guests.items() if rank not in items]:
            for guest in missing:
                try:
                    if (message := guest.receive()) is not None:
                        items[guest.rank] = message[1]
                except (OSError, EOFError, ValueError) as error:
                    why = (
                        f"rank {guest.rank} on {guest.host} ended while the ranks were starting up ({error}); look for "
                        "the error that it printed."
                    )
                    self._dismiss(why)
                    raise LaunchError(why) from error
            if waiting.is_over():
                why = f"{name_ranks([guest.rank for guest in missing])} did not finish starting up in time; {_LONGER}"
                self._dismiss(why)
                raise LaunchError(why)
            time.sleep(0.0005)
        everything = [items[rank] for rank in range(self.size)]
        for guest in self._guests.values():
            with contextlib.suppress(OSError):  # its absence is met by the next call
                guest.send(["all", everything])
        return everything

    def _dismiss(self, why: str) -> None:
        for guest in self._guests.values():
            with contextlib.suppress(OSError):
                guest.send(["error", why])

    def close(self) -> None:
        """Hang up."""
        for guest in [*self._guests.values(), *([self._own] if self._own else [])]:
            guest.socket.close()


def host(listener: socket.socket, size: int, secret: str) -> Bootstrap:
    """Rank 0's part: listen until everyone has called.

    Args:
        listener: a listening socket; closed before anyone is told that all are there.
        size: of the job.
        secret: what callers must know, "" for nothing.

    Raises:
        LaunchError: ranks are missing after RING_START_TIMEOUT seconds, two say they are the same, or versions differ.
    """
    name = socket.gethostname()
    guests: dict[int, Guest] = {}
    problems: list[str] = []
    with selectors.DefaultSelector() as selector, listener:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        waiting = _Patience(f"rank 0 on {name}")
        while len(guests) < size - 1 and not problems:
            for key, _ in selector.select(0.2):
                if key.fileobj is listener:
                    with contextlib.suppress(OSError):
                        connected, _ = listener.accept()
                        connected.settimeout(SECONDS)
                        stranger = Guest(connected)
                        stranger.send({"hello": _MAGIC, "nonce": stranger.nonce})
                        selector.register(connected, selectors.EVENT_READ, stranger)
                    continue
                guest: Guest = key.data
                try:
                    message = guest.receive()
                    if message is None:
                        continue
                    problem = _admit(guest, message, guests, size, secret)
                except (OSError, EOFError, ValueError, KeyError, TypeError):
                    problem = ""  # a stranger, or a rank that will call again
                selector.unregister(guest.socket)
                if problem is None:
                    guests[guest.rank] = guest
                elif problem:
                    problems.append(problem)
                    with contextlib.suppress(OSError):
                        guest.send(["error", problem])
                else:
                    guest.socket.close()
            missing = [rank for rank in range(1, size) if rank not in guests]
            here = f"{len(guests) + 1} of {size} ranks are here"
            waiting.say(f"{name_ranks(missing)} to call at port {_port(listener)}; {here}" if missing else "")
            if waiting.is_over():
                problems.append(
                    f"{name_ranks(missing)} of {size} did not come to rank 0 on {name}, port {_port(listener)}, in "
                    "time. "
                    "Were they started, and does their output say why they ended? A firewall between the hosts has "
                    f"the same effect. {_LONGER}"
                )
    call = Bootstrap(0, size, name, list(guests.values()), None)
    if problems:
        call._dismiss(problems[0])
        raise LaunchError(problems[0])
    for guest in guests.values():
        guest.send(["all", []])
    return call


def _admit(guest: Guest, message: Any, guests: dict[int, Guest], size: int, secret: str) -> str | None:
    """Take note of who calls; None if that is right, otherwise what is wrong, "" for a stranger."""
    if message["hello"] != _MAGIC:
        return ""
    rank, their_size, where = int(message["rank"]), int(message["size"]), str(message["host"])
    if not hmac.compare_digest(str(message["proof"]), proof(secret, guest.nonce, rank)):
        return (
            f"rank {rank} on {where} does not know the secret of this job (RING_SECRET, which the launcher sets): it "
            "belongs to another job, or was started without it."
        )
    if their_size != size:
        return f"rank {rank} on {where} was started for a job of {their_size} ranks, rank 0 for one of {size}."
    if not 0 < rank < size:
        return f"a process on {where} says it is rank {rank} of {size}; every rank must have a number of its own."
    if rank in guests:
        return f"two processes say they are rank {rank}: one on {guests[rank].host}, one on {where}."
    guest.rank, guest.host = rank, where
    return differences({0: (socket.gethostname(), own_versions()), rank: (where, message["versions"])}) or None


def join(rank: int, size: int, address: str, port: int, secret: str) -> Bootstrap:
    """The other ranks' part: call rank 0 until it answers.

    Args:
        rank, size: of this process and the job.
        address: name or number of rank 0's host.
        port: where it listens.
        secret: what it asks for, "" for nothing.

    Raises:
        LaunchError: it cannot be reached within RING_START_TIMEOUT seconds, or does not want this rank.
    """
    name = socket.gethostname()
    waiting = _Patience(f"rank {rank} on {name}")
    while True:
        try:
            connected = socket.create_connection((address, port), SECONDS)
            guest = Guest(connected)
            connected.settimeout(SECONDS)
            hello = next_message(guest, time.monotonic() + SECONDS)
            if not isinstance(hello, dict) or hello.get("hello") != _MAGIC:
                raise ValueError("who listens there does not speak ring_plugins")
            guest.send(
                {
                    "hello": _MAGIC,
                    "rank": rank,
                    "size": size,
                    "host": name,
                    "versions": own_versions(),
                    "proof": proof(secret, hello["nonce"], rank),
                }
            )
        except (OSError, EOFError, ValueError) as error:
            why = unreachable(address, port, error)
            waiting.say(f"rank 0: {why}")
            if waiting.is_over():
                raise LaunchError(f"rank {rank} on {name} could not reach rank 0: {why}. {_LONGER}") from error
            time.sleep(0.05)
            continue
        try:
            _answer(guest, f"the other ranks, with rank 0 at {address}:{port}", waiting)
        except (OSError, EOFError) as error:
            raise LaunchError(
                f"rank {rank} on {name} lost rank 0 at {address}:{port} while starting up ({error}); look for the "
                "error that rank 0 printed."
            ) from error
        return Bootstrap(rank, size, address, [], guest)


def proof(secret: str, nonce: str, rank: int) -> str:
    """What only someone who knows the secret can say."""
    return hmac.new(secret.encode(), f"{nonce} {rank}".encode(), hashlib.sha256).hexdigest()


_LONGER = "Set RING_START_TIMEOUT to wait longer."


class _Patience:
    """How long to wait, and when to say for whom."""

    def __init__(self, who: str, extra: float = 0.0) -> None:
        self.who = who
        self._started = time.monotonic()
        self._limit = config.START_TIMEOUT.get() + extra
        self._next = _PATIENCE

    def is_over(self) -> bool:
        return time.monotonic() - self._started > self._limit

    def say(self, what: str) -> None:
        waited = time.monotonic() - self._started
        if what and waited > self._next:
            self._next *= 2
            logger.info(f"{self.who} has waited {waited:.0f} s for {what}.")


def _answer(guest: Guest, what: str, waiting: _Patience | None = None) -> list[Any]:
    """The next message of rank 0, which is everyone's payloads or an error."""
    # Rank 0 is to speak first, since it knows more.
    waiting = _Patience(waiting.who if waiting else f"a rank on {socket.gethostname()}", extra=5.0)
    while (message := guest.receive()) is None:
        if waiting.is_over():
            raise LaunchError(f"waited for {what} in vain. {_LONGER}")
        waiting.say(what)
        time.sleep(0.0005)
    if message[0] == "error":
        raise LaunchError(message[1])
    found: list[Any] = message[1]
    return found


def _port(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def job_secret() -> str:
    """RING_SECRET, which a launcher gives to all ranks of a job, or "" where there is none."""
    return config.SECRET.get()
