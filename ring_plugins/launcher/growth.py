"""How a user asks a running `ring run` for added ranks: `ring add-ranks`, from another terminal of the host.

A `ring run` whose job may change listens at a socket in Linux's abstract namespace, whose name has its user, its
process id and something random: it leaves no file behind, nobody can take the name first, and /proc/net/unix lists all
such jobs. Any program of the host can connect there, so both sides ask the kernel for the other's user (SO_PEERCRED),
and take nothing from anybody else; the secret of the handshake is empty. The request is a word, a number and perhaps a
host, and the answer is a line for the user.

`ring run` looks at the socket between two looks at its processes. It never waits for whoever has connected.

Considered and rejected: a signal, which has neither a number of ranks nor an answer.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ring_plugins.core.base.errors import ArgumentError, LaunchError, quoted
from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import Claim, ClientHandshake, Disconnected, Purpose, authenticate
from ring_plugins.core.net.frames import FrameSocket
from ring_plugins.core.net.peers import Peers
from ring_plugins.core.net.sockets import connect_below, connect_to, listen_below, names_below, why_users_are_unknown

#: Bytes of the longest request, and of the longest answer.
_REQUEST, _ANSWER = 512, 4096
#: Seconds for which the jobs of a host are looked for, and for which a user waits for the answer.
_PATIENCE, _WAITS = 2.0, 10.0
#: Connections at once.
_MOST = 8


def _name(pid: int | str) -> str:
    return f"ring_plugins/run/{os.geteuid()}/{pid}"


class GrowthRequests:
    """The end of `ring run`, a context manager.

    Args:
        add: lets ranks join, given their number and perhaps a host; its answer begins with "ok: " or "no: ".
    """

    def __init__(self, add: Callable[[int, str | None], str]) -> None:
        self._add, self._numbers = add, itertools.count()
        listener = socket.socket(socket.AF_UNIX)
        listen_below(listener, _name(os.getpid()), _MOST)
        acceptor = Acceptor(b"", Purpose.LAUNCHER, lambda claim: not why_users_are_unknown(), limit=_MOST)
        acceptor.add(listener)
        self._peers = Peers(acceptor)

    def __enter__(self) -> GrowthRequests:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._peers.close()

    def poll(self) -> None:
        """Answer the requests that have come."""
        ready = self._peers.wait(0.0)
        for new in self._peers.accepted():
            for oldest in list(self._peers)[: 1 - _MOST]:
                self._peers.hang_up(oldest)
            self._peers.add(next(self._numbers), FrameSocket(new.socket, Purpose.LAUNCHER, _REQUEST))
        for number, event in self._peers.events(ready):
            if isinstance(event, bytes):
                if found := re.fullmatch(rb"add (\d{1,6})(?: ([\w.@-]+))?", event):
                    host = found[2].decode() if found[2] else None
                    self._peers.send(number, self._add(int(found[1]), host).encode()[:_ANSWER])
                self._peers.hang_up(number)


def running_jobs() -> dict[int, str]:
    """Process ids of this user's `ring run`s on this host that listen, and the commands that they run."""
    found, deadline = dict[int, str](), time.monotonic() + _PATIENCE  # for all: others may list what never accepts
    left = names_below(_name("[0-9]+"))
    while left and time.monotonic() < deadline:
        full = []
        for one in left:
            try:
                connection = connect_to(one)
            except BlockingIOError:
                full.append(one)
                continue
            if connection is None:  # only another user says that it runs, or it has just ended
                continue
            connection.close()
            pid = int(one.split("/")[-2])
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                if b"run" in words:  # before it is what starts the `ring` command
                    words = [b"ring", *words[words.index(b"run") :]]
                found[pid] = quoted(b" ".join(words).decode(errors="replace"))
        left = full
        time.sleep(0.02 if left else 0.0)
    return found


def request_ranks(number: int, job: int | None, host: str | None = None) -> str:
    """Ask a `ring run` of this user for added ranks; returns what it says.

    Args:
        number: how many.
        job: its process id; None for the only one.
        host: where they are to run, as `-H` names it; None to leave that to `ring run`.

    Raises:
        ArgumentError: the number is not positive, the host is no name, or there is no such job, or there are several.
        LaunchError: it refuses, or does not answer, or could be a stranger's process.
    """
    if not 1 <= number < 10**6:
        raise ArgumentError(
            f"{number} is not a number of ranks by which a job can grow: give how many, as in `ring add-ranks 2`."
        )
    if host is not None and not re.fullmatch(r"[\w.@-]{1,255}", host, re.ASCII):
        raise ArgumentError(f"--host {host!r} is not a host: give the name that `ring run -H` has for it.")
    if why := why_users_are_unknown():
        raise LaunchError(
            f"no process can tell your `ring run` from a stranger's, as {why}: ask as a user that the namespace knows."
        )
    jobs = running_jobs()
    listed = "".join(f"\n  {pid}: {command}" for pid, command in jobs.items())
    if job is None and not jobs:
        raise ArgumentError(
            "no `ring run` of yours on this host has a job that can grow: start one with `ring run --on-failure "
            "replace --max-ranks 4`. If it runs on another host, ask there."
        )
    if job is None and len(jobs) > 1:
        raise ArgumentError(f"several jobs run here; choose one with --job and its process id:{listed}")
    pid = next(iter(jobs)) if job is None else job
    connected = connect_below(_name(pid), _WAITS)
    if connected is None and pid in jobs:
        raise LaunchError(f"ring run (process {pid}) takes no requests at the moment, or has just ended: ask again.")
    if connected is None:
        others = f" Those that can:{listed}" if jobs else ""
        raise ArgumentError(
            f"--job {pid} is not the process id of a `ring run --on-failure replace` of yours on this host. If it runs "
            f"on another host, ask there.{others}"
        )
    with connected:
        try:
            authenticate(connected, ClientHandshake(b"", Purpose.LAUNCHER, Claim(0)), _WAITS)
            frames = FrameSocket(connected, Purpose.LAUNCHER, _ANSWER)
            frames.say(f"add {number}{f' {host}' if host else ''}".encode(), _WAITS)
            answer = (frames.receive(_WAITS) or b"").decode(errors="replace")
        except (OSError, Disconnected) as error:
            raise LaunchError(f"ring run (process {pid}) does not answer: {error}.") from None
    kind, _, text = answer.partition(": ")
    if kind != "ok":
        raise LaunchError(f"{quoted(text, _ANSWER) or 'ring run ended before it answered'}.")
    return f"{quoted(text, _ANSWER)}."
