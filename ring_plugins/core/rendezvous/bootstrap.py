"""Bootstraps a job on several hosts without MPI: all ranks connect to rank 0, which knows which are missing.

Rank 0 listens (`serve`), the other ranks connect until it answers (`join`), and both get a `Bootstrap`, whose `gather`
exchanges small records while the job starts. The file is long since both ends of this protocol are best read side by
side. Connections authenticate themselves with RING_SECRET (core/net/auth.py). Then each message is JSON, compressed if
it is long:

    rank -> rank 0   ["join", {size, host, versions}]   once; rank 0 checks that it fits the job
                     ["gather", payload]                its contribution to a gather
    rank 0 -> rank   ["gathered", payloads]             of all ranks, in rank order; [] once all ranks have joined
                     ["abort", text]                    why the job cannot start

A connection that does not know the secret is closed, reported once with its address, and otherwise ignored: anyone can
make one. A user's mistake, such as RING_SECRET set on some ranks only, is reported on both sides: the rejected rank
raises an error, and rank 0 mentions refused connections while it waits.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import select
import socket
import time
import zlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError, name_ranks, printable, quoted
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.member import Member
from ring_plugins.core.base.progress_line import ProgressLine, arrivals, hosts_of
from ring_plugins.core.linux.process import raise_open_file_limit
from ring_plugins.core.net.acceptor import Acceptor, Authenticated
from ring_plugins.core.net.auth import (
    Claim,
    Disconnected,
    Handshake,
    Purpose,
    WrongSecret,
    authenticate,
    wait_for,
)
from ring_plugins.core.net.frames import FrameSocket, Unreached, from_json, reach, to_json
from ring_plugins.core.net.peers import Event, Peers
from ring_plugins.core.net.sockets import UnknownUser, are_same_user
from ring_plugins.core.rendezvous.record import differences, own_versions

#: Seconds that connecting, joining after the handshake, or sending a message may take.
SECONDS = 5.0
#: Seconds after which a waiting rank logs what it waits for; the time doubles with each message.
_FIRST_NOTICE = 10.0
#: Connections that rank 0 keeps in addition to those of its ranks, and rejected addresses that it reports.
_OTHER_CONNECTIONS, _REPORTED = 64, 20
#: Seconds for which rank 0 sleeps at most while ranks join; local ones may wait so long until it looks whose they are.
_POLL = 0.05
#: Open files that rank 0 needs beside a connection to every rank.
_OTHER_FILES = 512
#: Bytes from which rank 0 compresses a message, which it sends to every rank: hundreds of ranks have similar payloads,
#: of which a tenth remains. With that, rank 0 sends a gather of 1,024 ranks in less time than it takes to make it, and
#: a tree of ranks would gain nothing.
_COMPRESSED, _ZLIB = 4096, b"z"
#: Bytes of the longest message once decompressed.
_LONGEST_UNPACKED = 1 << 28
#: Characters of a host's name, of a version, and of what rank 0 says, as messages show them.
_HOST, _VERSION, _ABORT = 64, 40, 4000
#: Bytes of the first message. Without RING_SECRET everyone can send one.
_LONGEST_JOIN = 1 << 16
_LONGER = "Set RING_START_TIMEOUT to wait longer."


def _pack(message: Any) -> bytes:
    """A message of rank 0 as bytes."""
    data = to_json(message)
    return data if len(data) < _COMPRESSED else _ZLIB + zlib.compress(data, 1)


def _unpack(data: bytes) -> Any:
    """The message that bytes of rank 0 hold.

    Raises:
        Disconnected: they hold none.
    """
    if data[:1] == _ZLIB:
        try:
            data = zlib.decompressobj().decompress(data[1:], _LONGEST_UNPACKED)
        except zlib.error as error:
            raise Disconnected("it sent an invalid message") from error
    return from_json(data)


def _body(event: Event, kind: str) -> Any:
    """What the message of a rank holds.

    Raises:
        Disconnected: it is another one, or the rank has ended.
    """
    if isinstance(event, Disconnected):
        raise event
    return _content(from_json(event), kind)


def _content(message: Any, kind: str) -> Any:
    if not isinstance(message, list) or len(message) != 2 or message[0] != kind:
        raise Disconnected(f'it did not send "{kind}"')
    try:
        return printable(message[1])  # the names of hosts stand in messages to the user
    except RecursionError as error:
        raise Disconnected("it sent an invalid message") from error


def _read_join(event: Event) -> tuple[int, str, dict[str, str]]:
    """The job's size, the host and the versions of a rank that joins.

    Raises:
        Disconnected: it is another message.
    """
    body = _body(event, "join")
    size, host, versions = map(body.get, ("size", "host", "versions")) if isinstance(body, dict) else (None,) * 3
    if not (isinstance(size, int) and isinstance(host, str) and isinstance(versions, dict)):
        raise Disconnected("it sent an invalid message")
    return size, quoted(host, _HOST), {name: quoted(version, _VERSION) for name, version in versions.items()}


# Rank 0 -----------------------------------------------------------------------------------------------


def serve(listener: socket.socket, size: int, secret: str) -> Bootstrap:
    """Wait on rank 0 until every rank has joined.

    Args:
        listener: a listening socket; closed before any rank learns that all are there.
        size: of the job.
        secret: that the ranks must know, "" for none.

    Raises:
        LaunchError: ranks are missing after RING_START_TIMEOUT seconds, two claim the same number, versions differ, or
            without RING_SECRET, the kernel does not tell this user's processes from those of others.
    """
    server = _RankZero(listener, size, secret)
    try:
        server.meet()
    except UnknownUser as error:
        raise server.failed(f"rank 0 on {socket.gethostname()} {error}") from error
    except BaseException:
        server.close()
        raise
    return server


class _Joining(NamedTuple):
    """A connection that has authenticated itself and has not sent "join" yet."""

    rank: int
    frames: FrameSocket
    deadline: float


class _RankZero:
    """Rank 0's end. Connections are numbered as they come, since anyone may claim to be any rank.

    Attributes:
        members: the ranks that have joined, by the numbers of their connections.
    """

    rank = 0

    def __init__(self, listener: socket.socket, size: int, secret: str) -> None:
        raise_open_file_limit(size + _OTHER_FILES)
        self.members: dict[int, Member] = {}
        self._size, self._name = size, socket.gethostname()
        self._port: int = listener.getsockname()[1]
        self._limit = size + _OTHER_CONNECTIONS
        self._joining: dict[int, _Joining] = {}
        self._rejected: dict[str, int] = {}
        self._numbers = itertools.count()
        acceptor = Acceptor(
            _key(secret),
            Purpose.BOOTSTRAP,
            limit=self._limit,
            on_wrong_secret=self._note_wrong_secret,
            are_own=functools.partial(are_same_user, unknown=_if_unknown()),
        )
        acceptor.add(listener)
        self._peers = Peers(acceptor)

    def meet(self) -> None:
        """Wait for all ranks.

        Raises:
            LaunchError: as for `serve`.
        """
        waiting, where = _Waiting(f"rank 0 on {self._name}"), f" to connect to port {self._port} on {self._name}"
        with ProgressLine() as line:
            while len(self.members) < self._size - 1:
                for number, event in self._turn(_POLL):
                    self._take(number, event)
                now = time.monotonic()
                for number in [number for number, joining in self._joining.items() if joining.deadline < now]:
                    self._drop(number)
                line.show(lambda: arrivals(self._came(), self._size, where) + self._rejections())
                if waiting.is_over():
                    missing = sorted(set(range(self._size)).difference(self._came()))
                    raise self.failed(
                        f"{name_ranks(missing)} of {self._size} did not connect to rank 0 on {self._name}, port "
                        f"{self._port}, in time; {len(self.members) + 1} ranks have come{hosts_of(self._came())}. Were "
                        "the others started, and does their output say why they ended? A firewall between the hosts "
                        f"has the same effect{self._rejections()}. {_LONGER}"
                    )
        self._peers.stop_accepting()
        for number in list(self._joining):
            self._drop(number)
        self._send_all(["gathered", []])

    def gather(self, payload: Any) -> list[Any]:
        """Every rank's payload (values that JSON can hold) in rank order; all ranks call.

        Raises:
            LaunchError: a rank ended, or did not call within RING_START_TIMEOUT seconds.
        """
        items: dict[int, Any] = {0: printable(payload)}  # as the other ranks see it
        waiting = _Waiting(f"rank 0 on {self._name}")
        with ProgressLine() as line:
            while len(items) < self._size:
                for number, event in self._turn(0.2):
                    items[self.members[number].rank] = self._message(number, event)
                if waiting.is_over():
                    late = {one.rank: one.host for one in self.members.values() if one.rank not in items}
                    raise self.failed(
                        f"{name_ranks(sorted(late))} did not finish starting up in time{hosts_of(late)}; {_LONGER}"
                    )
                line.show(lambda: arrivals({r: self._came()[r] for r in items}, self._size, " to go on with init()"))
        everything = [items[rank] for rank in range(self._size)]
        self._send_all(["gathered", everything])  # the next gather notices a rank that is lost here
        return everything

    def close(self) -> None:
        """Close all connections."""
        self._peers.close()

    def failed(self, why: str, others: Collection[int] = ()) -> LaunchError:
        """Tell the ranks why the job cannot start, and close; returns the error to raise.

        Args:
            why: it cannot.
            others: numbers of connections that are no rank's, to be told, too.
        """
        for number in others:
            self._peers.send(number, _pack(["abort", why]))
        self._send_all(["abort", why])
        list(self._peers.events(self._peers.wait(0.0)))  # closing with unread bytes may discard what was sent last
        self.close()
        return LaunchError(why)

    def _turn(self, seconds: float) -> Iterator[tuple[int, Event]]:
        ready = self._peers.wait(seconds)
        for new in self._peers.accepted():
            if len(self._joining) >= self._limit:
                self._drop(next(iter(self._joining)))
            self.begin(new)
        return self._peers.events(ready)

    def begin(self, new: Authenticated) -> None:
        """Wait for what a new connection says."""
        number = next(self._numbers)
        frames = FrameSocket(new.socket, Purpose.BOOTSTRAP, longest=_LONGEST_JOIN)
        self._joining[number] = _Joining(new.claim.rank, frames, time.monotonic() + SECONDS)
        self._peers.add(number, frames)

    def _drop(self, number: int) -> None:
        del self._joining[number]
        self._peers.hang_up(number)

    def _take(self, number: int, event: Event) -> None:
        if number not in self._joining:
            self._message(number, event)
            return
        try:
            size, host, versions = _read_join(event)
        except Disconnected:
            self._drop(number)  # a rank that will connect again or, without RING_SECRET, anyone
            return
        joining = self._joining.pop(number)
        if problem := self._problem(joining.rank, size, host, versions):
            raise self.failed(problem, [number])
        joining.frames.allow_longest()
        self.members[number] = Member(joining.rank, host=host)

    def _message(self, number: int, event: Event) -> Any:
        """What a rank contributes to a gather."""
        try:
            return _body(event, "gather")
        except Disconnected as error:
            one = self.members[number]
            raise self.failed(
                f"rank {one.rank} on {one.host} ended while the ranks were starting up ({error}); look for the error "
                "that it printed."
            ) from error

    def _send_all(self, message: Any) -> None:
        """Send a message to all ranks in parallel, for `SECONDS` at most."""
        data = _pack(message)
        for number in self.members:
            self._peers.send(number, data)
        self._peers.flush(SECONDS)

    def _came(self) -> dict[int, str]:
        """The hosts of the ranks that have come."""
        return {0: self._name, **{one.rank: one.host for one in self.members.values()}}

    def _problem(self, rank: int, size: int, host: str, versions: dict[str, str]) -> str:
        if size != self._size:
            return f"rank {rank} on {host} was started for a job of {size} ranks, rank 0 for one of {self._size}."
        if not 0 < rank < size:
            return (
                f"a process on {host} claims to be rank {rank} of {size}; ranks must be distinct, and below the size."
            )
        if rank in self._came():
            return f"two processes claim to be rank {rank}: one on {self._came()[rank]}, one on {host}."
        return differences({0: (self._name, own_versions()), rank: (host, versions)})

    def _note_wrong_secret(self, address: str) -> None:
        if address not in self._rejected and len(self._rejected) < _REPORTED:
            logger.warning(
                f"rank 0 on {self._name} refused a connection from {address} that does not know this job's secret: a "
                "rank whose RING_SECRET differs, or a process of another job."
            )
        if address in self._rejected or len(self._rejected) < _REPORTED:
            self._rejected[address] = self._rejected.pop(address, 0) + 1

    def _rejections(self) -> str:
        if not self._rejected:
            return ""
        return (
            f"; rejected {sum(self._rejected.values())} connections with another secret, the last from "
            f"{list(self._rejected)[-1]} (is RING_SECRET the same on all ranks?)"
        )


# The other ranks --------------------------------------------------------------------------------------


def join(rank: int, size: int, address: str, port: int, secret: str) -> Bootstrap:
    """Connect to rank 0, retrying until it answers, and wait until every rank has joined.

    Args:
        rank, size: of this process and the job.
        address: name or address of rank 0's host.
        port: where it listens.
        secret: of the job, "" for none.

    Raises:
        LaunchError: it cannot be reached within RING_START_TIMEOUT seconds, or rejects this rank.
    """
    name = socket.gethostname()
    waiting = _Waiting(f"rank {rank} on {name}")

    def places() -> list[tuple[str, int]]:
        """Rank 0 listens at IPv4 addresses: at ::1, "localhost" may lead to somebody else."""
        found = socket.getaddrinfo(address, port, socket.AF_INET, socket.SOCK_STREAM)
        return [(str(numeric), port) for *_, (numeric, *_) in found]

    def gives_up(why: Unreached) -> bool:
        waiting.say(f"rank 0: {unreachable(address, port, why.error)}")
        return isinstance(why.error, WrongSecret) or waiting.is_over()

    try:
        seconds = min(SECONDS, config.START_TIMEOUT.get())
        server = reach(places, _key(secret), Purpose.BOOTSTRAP, Claim(rank), seconds, gives_up, check=check_user)
    except UnknownUser as error:
        raise LaunchError(f"rank {rank} on {name} {error}") from error
    except Unreached as why:
        if isinstance(why.error, WrongSecret):
            raise LaunchError(
                f"rank {rank} on {name} cannot join the job: rank 0 rejected this rank's secret: set RING_SECRET alike "
                f"on all ranks. Otherwise another job listens at {address}:{port}."
            ) from why
        text = unreachable(address, port, why.error)
        raise LaunchError(f"rank {rank} on {name} could not reach rank 0: {text}. {_LONGER}") from why
    try:
        server.say(to_json(["join", {"size": size, "host": name, "versions": own_versions()}]), SECONDS)
        _answer(server, f"the other ranks, with rank 0 at {address}:{port}", waiting.name)
    except (OSError, Disconnected) as error:
        server.close()
        raise LaunchError(
            f"rank {rank} on {name} lost rank 0 at {address}:{port} while starting up ({error}); look for the error "
            "that rank 0 printed."
        ) from error
    return _OtherRank(rank, address, server)


class _OtherRank:
    """Another rank's end: its connection to rank 0."""

    def __init__(self, rank: int, host: str, server: FrameSocket) -> None:
        self.rank, self._host, self._server = rank, host, server

    def gather(self, payload: Any) -> list[Any]:
        """As `_RankZero.gather`."""
        try:
            self._server.say(to_json(["gather", payload]), config.START_TIMEOUT.get())
            return _answer(self._server, "rank 0")
        except (OSError, Disconnected) as error:
            raise LaunchError(
                f"rank {self.rank} on {socket.gethostname()} lost rank 0 on {self._host} while starting up "
                f"({error}); look for the error that rank 0 printed."
            ) from error

    def close(self) -> None:
        """Close the connection."""
        self._server.close()


#: What `serve` and `join` return: a rank's end of the connections through rank 0.
Bootstrap = _RankZero | _OtherRank


def check_user(connected: socket.socket, handshake: Handshake) -> None:
    """Raise unless this user's process, or one of another host, is at the other end of a connection.

    Asked before what it says counts, but after it has begun to speak: until it accepts, the kernel knows no user.

    Args:
        connected: the connection.
        handshake: to be made over it.
    """
    if not wait_for(connected, select.POLLIN, SECONDS):
        raise TimeoutError("no answer")
    try:
        if not are_same_user([connected], _if_unknown())[0]:
            data = connected.recv(handshake.missing)
            handshake.feed(data)  # which says if it speaks something else; what it would answer is not sent
            raise Disconnected("another user's process listens there" if data else "it closed the connection")
    except UnknownUser:
        authenticate(connected, handshake, SECONDS)  # rank 0 asks after it, and ends the start, too
        raise


def unreachable(address: str, port: int, error: Exception) -> str:
    """Why an address cannot be reached, and what to do about it."""
    at = f"{address}:{port}"
    if isinstance(error, socket.gaierror):
        return (
            f"the name {address} does not resolve here ({error.strerror}); add it to /etc/hosts or DNS, or set "
            "MASTER_ADDR to an address"
        )
    numeric = ""
    with contextlib.suppress(OSError):
        numeric = str(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0])
    if numeric.startswith("127.") and not address.startswith("127."):
        return (
            f"{address} resolves to {numeric} here, which is this host itself, and nothing listens there. If rank 0 "
            f"runs on another host, correct the line of /etc/hosts on {socket.gethostname()}, or set MASTER_ADDR to "
            "an address"
        )
    if isinstance(error, TimeoutError):
        return f"no answer from {at}: the host is down, or a firewall drops what is sent to that port"
    if isinstance(error, ConnectionRefusedError):
        return f"{at} refuses connections: rank 0 is not listening yet, has ended, or listens elsewhere"
    if isinstance(error, Disconnected):
        return f"the process that listens at {at} does not answer as rank 0 of a ring_plugins job ({error})"
    return f"{at} cannot be reached ({getattr(error, 'strerror', None) or error})"


def _answer(server: FrameSocket, what: str, name: str = "") -> list[Any]:
    """The next message of rank 0: every rank's payload."""
    # Rank 0 times out first, and shows meanwhile whom it waits for.
    waiting = _Waiting(name or f"a rank on {socket.gethostname()}", extra=5.0)
    while (data := server.receive(0.2)) is None:
        if waiting.is_over():
            raise LaunchError(f"{waiting.name} timed out waiting for {what}. {_LONGER}")
    message = _unpack(data)
    if isinstance(message, list) and message[:1] == ["abort"] and len(message) == 2:
        raise LaunchError(quoted(message[1], _ABORT))
    found = _content(message, "gathered")
    if not isinstance(found, list):
        raise Disconnected("it sent an invalid message")
    return found


# Both -------------------------------------------------------------------------------------------------


class _Waiting:
    """A deadline, and log messages on the way there."""

    def __init__(self, name: str, extra: float = 0.0) -> None:
        self.name = name
        self._began = time.monotonic()
        self._limit = config.START_TIMEOUT.get() + extra
        self._next = _FIRST_NOTICE

    def is_over(self) -> bool:
        return time.monotonic() - self._began > self._limit

    def say(self, what: str) -> None:
        waited = time.monotonic() - self._began
        if waited > self._next:
            self._next *= 2
            logger.info(f"{self.name} has waited {waited:.0f} s for {what}.")


def _if_unknown() -> bool | None:
    """What to believe of a connection inside this host if the kernel does not say whose it is: see `are_same_user`."""
    return True if config.SECRET.get() else None


def _key(secret: str) -> bytes:
    return secret.encode("utf-8", "surrogateescape")
