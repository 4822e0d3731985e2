"""How a user asks a running `ring run` for added ranks: `ring add-ranks`, from another terminal of the host.

A `ring run` whose job may change answers it (core/net/local_service.py). The request is a word, a number and perhaps a
host, and the answer is a line for the user. `ring run` looks for requests between two looks at its processes.

Considered and rejected: a signal, which has neither a number of ranks nor an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ring_plugins.core.base.errors import ArgumentError, LaunchError, quoted
from ring_plugins.core.net.auth import Disconnected
from ring_plugins.core.net.local_service import LocalService, connected, processes
from ring_plugins.core.net.sockets import why_users_are_unknown

_SERVICE = "run"
#: Bytes of the longest request, and of the longest answer.
_REQUEST, _ANSWER = 512, 4096
#: Seconds for which a user waits for the answer.
_WAITS = 10.0


class GrowthRequests:
    """The end of `ring run`, a context manager.

    Args:
        add: lets ranks join, given their number and perhaps a host; its answer begins with "ok: " or "no: ".
    """

    def __init__(self, add: Callable[[int, str | None], str]) -> None:
        self._add, self._service = add, LocalService(_SERVICE, _REQUEST)

    def __enter__(self) -> GrowthRequests:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._service.close()

    def poll(self) -> None:
        """Answer the requests that have come."""
        for number, request in self._service.poll():
            if found := re.fullmatch(rb"add (\d{1,6})(?: ([\w.@-]+))?", request):
                host = found[2].decode() if found[2] else None
                self._service.send(number, self._add(int(found[1]), host)[:_ANSWER])
            self._service.hang_up(number)


def running_jobs() -> dict[int, str]:
    """Process ids of this user's `ring run`s on this host that listen, and the commands that they run."""
    jobs = {}
    for pid, words in processes(_SERVICE).items():
        # Before the word "run" is what starts the `ring` command.
        shown = ["ring", *words[words.index("run") :]] if "run" in words else words
        jobs[pid] = quoted(" ".join(shown))
    return jobs


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
    try:
        frames = connected(_SERVICE, pid, _ANSWER, _WAITS)
        if frames is not None:
            try:
                frames.say(f"add {number}{f' {host}' if host else ''}".encode(), _WAITS)
                answer = (frames.receive(_WAITS) or b"").decode(errors="replace")
            finally:
                frames.close()
    except (OSError, Disconnected) as error:
        raise LaunchError(f"ring run (process {pid}) does not answer: {error}.") from None
    if frames is None and pid in jobs:
        raise LaunchError(f"ring run (process {pid}) takes no requests at the moment, or has just ended: ask again.")
    if frames is None:
        others = f" Those that can:{listed}" if jobs else ""
        raise ArgumentError(
            f"--job {pid} is not the process id of a `ring run --on-failure replace` of yours on this host. If it runs "
            f"on another host, ask there.{others}"
        )
    kind, _, text = answer.partition(": ")
    if kind != "ok":
        raise LaunchError(f"{quoted(text, _ANSWER) or 'ring run ended before it answered'}.")
    return f"{quoted(text, _ANSWER)}."
